"""Files that hold one JSON object. Small processes read them too, so this module imports little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagerunner.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        CheckpointError: the file is missing, unreadable, or does not hold one JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(values).__name__}.")
    return values
