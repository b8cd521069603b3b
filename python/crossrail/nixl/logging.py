"""Loggers under `nixl`, as NIXL makes them: to stdout, at the level of NIXL_LOG_LEVEL (INFO)."""

from __future__ import annotations

import logging
import logging.config
import os
from typing import Any

LOGGING_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "simpleFormatter": {
            "format": "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s",
            "datefmt": "%Y-%m-%d %H:%M:%S",
        }
    },
    "handlers": {
        "consoleHandler": {
            "class": "logging.StreamHandler",
            "level": "INFO",
            "formatter": "simpleFormatter",
            "stream": "ext://sys.stdout",
        }
    },
    "loggers": {"nixl": {"level": "INFO", "handlers": ["consoleHandler"], "propagate": False}},
}

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}

_configured = False


def setup_logging() -> None:
    """Configures the logger `nixl`, once."""
    global _configured
    if _configured:
        return
    _configured = True
    logging.config.dictConfig(LOGGING_CONFIG)
    logger = logging.getLogger("nixl")
    wanted = os.getenv("NIXL_LOG_LEVEL", "")
    if wanted.upper() in _LEVELS:
        logger.setLevel(_LEVELS[wanted.upper()])
    elif wanted:
        logger.warning("NIXL_LOG_LEVEL: %r is not one of %s", wanted, ", ".join(_LEVELS))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, by its name without leading underscores."""
    setup_logging()
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
