"""Commands that belong to no component: configuration."""

import argparse
import sys

from poolmeter.config import config_path, load_config


class ConfigCheck:
    """Check a configuration file: silent and 0 when it can be honoured, else one sentence and 2."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", nargs="?", help="the file (the one in force)")

    def run(self, args: argparse.Namespace) -> int:
        load_config(args.config if args.file is None else args.file)
        return 0


class ConfigShow:
    """Show the configuration in force, defaults included, as JSON."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        config = load_config(args.config)
        sys.stderr.write(f"from {config_path(args.config) or 'defaults'}\n")
        sys.stdout.write(config.model_dump_json(indent=2) + "\n")
        return 0
