"""`python -m pagerunner` is the `pagerunner` command."""

from pagerunner.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
