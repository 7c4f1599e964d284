"""How commands log: JSON lines in a pipe, plain ones on a terminal. An import sets nothing up."""

import logging
import sys

import orjson

__all__ = ["JsonFormatter", "log_to_stderr"]


class JsonFormatter(logging.Formatter):
    """Records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


def log_to_stderr(level: str) -> bool:
    """Configure `logging` for this process, from the level named `level` on.

    Returns:
        whether stderr is a terminal and lines are plain.
    """
    plain = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        if plain
        else JsonFormatter()
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, handlers=[handler], force=True)
    return plain
