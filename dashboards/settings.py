"""Which data folder and configuration the pages read, from the environment that `poolmeter dashboard` sets."""

import os
from dataclasses import dataclass
from pathlib import Path

from poolmeter.config import Config, load_config
from poolmeter.places import CollectorData, data_folder


@dataclass(frozen=True)
class Settings:
    """`data` is the collector's data folder; the pages only read it."""

    data: Path
    config: Config

    @property
    def store(self) -> Path:
        """The usage store."""
        return CollectorData(self.data).store


def settings() -> Settings:
    """From $POOLMETER_DATA and $POOLMETER_CONFIG. Raises BadInput."""
    return Settings(data_folder(os.environ.get("POOLMETER_DATA")), load_config(None))
