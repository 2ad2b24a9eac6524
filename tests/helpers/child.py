"""A process as `pagerunner.children` starts them: it tells its first line, environment and path, and ends with its parent."""

from __future__ import annotations

import json
import os
import sys

from pagerunner.children import read_first_line, wait_for_parents_end

if __name__ == "__main__":
    line = read_first_line("helpers.child").decode().strip()
    print(
        json.dumps({"line": line, "environment": dict(os.environ), "path": sys.path, "session": os.getsid(0)}),
        flush=True,
    )
    wait_for_parents_end(os.getppid())
