"""The commands of the register: assets list, show, import, depreciation and matrix."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting.commands import add_rating_options
from poolmeter.clock import SystemClock
from poolmeter.config import Config, load_config
from poolmeter.errors import BadInput
from poolmeter.period import add_period_options, parse_period
from poolmeter.places import CollectorData, data_folder
from poolmeter.report import Report, write

if TYPE_CHECKING:
    from poolmeter.accounting.assets.register import Device
    from poolmeter.books.assets import Row

IMPORT_COLUMNS = ("uuid", "change")


def _devices(args: argparse.Namespace, config: Config) -> "list[Device]":
    from poolmeter.accounting.assets.register import devices_of
    from poolmeter.accounting.source import ask

    register = _register(args, config)
    return ask(CollectorData(data_folder(args.data)).store, lambda connection: devices_of(connection, register))


def _register(args: argparse.Namespace, config: Config) -> "list[Row]":
    from poolmeter.accounting.assets.asset_store import open_assets

    with open_assets(data_folder(args.data), config.collector) as store:
        return list(store.list())


class AssetsList:
    """List the register of devices: what people wrote of them, and of what they did not, what the store knows."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        for name in ("node", "owner", "model", "class"):
            parser.add_argument(f"--{name}", metavar=name[0].upper(), help=f"only devices of this {name}")
        parser.add_argument("--without-owner", action="store_true", help="only devices without an owner")
        parser.add_argument("--without-price", action="store_true", help="only devices without a price")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.assets.register import chosen, list_report

        without = [name for name in ("owner", "price") if getattr(args, f"without_{name}")]
        filters = {name: getattr(args, name) for name in ("node", "owner", "model", "class")}
        write(list_report(chosen(_devices(args, load_config(args.config)), filters, without)), args.format, args.output)
        return 0


class AssetsShow:
    """Show one device of the register, and which node had it from when to when."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("uuid", metavar="UUID", help="the device")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.assets.register import show_report

        for device in _devices(args, load_config(args.config)):
            if device["uuid"] == args.uuid:
                write(show_report(device), args.format, args.output)
                return 0
        raise BadInput(f"device {args.uuid!r:.60} is neither in the register nor in the store, expected a uuid of poolmeter assets list")


class AssetsImport:
    """Fill the register from a CSV file with a header: uuid, and any of the other columns. All of the file or nothing of it.

    An empty cell takes the field away; a field without a column stays. The same file again changes nothing.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", type=Path, help="the CSV file")
        parser.add_argument("--reason", required=True, metavar="WHY", help="why, for the books' log")
        parser.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
        parser.add_argument("--allow-unknown", action="store_true", help="take devices that the store has never seen")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.assets.asset_store import open_assets
        from poolmeter.accounting.assets.register import devices_of
        from poolmeter.accounting.assets.sheet import read_sheet
        from poolmeter.accounting.source import ask
        from poolmeter.books.commands import user_name

        config, data = load_config(args.config), data_folder(args.data)
        devices = ask(CollectorData(data).store, lambda connection: devices_of(connection, ()))
        seen = {str(device["uuid"]) for device in devices}
        with open_assets(data, config.collector) as store:
            rows = read_sheet(args.file, store.list(), seen, args.allow_unknown)
            entered = store.enter(rows, user_name(), args.reason, args.dry_run)
        changes = dict.fromkeys(entered.added, "added") | dict.fromkeys(entered.changed, "changed")
        found = tuple({"uuid": uuid, "change": change} for uuid, change in sorted(changes.items()))
        totals = {"added": len(entered.added), "changed": len(entered.changed), "unchanged": len(entered.unchanged)}
        warnings = ("dry run: nothing was changed",) if args.dry_run else ()
        write(Report("assets_import", IMPORT_COLUMNS, found, totals=totals, warnings=warnings), args.format, args.output)
        return 0


class AssetsDepreciation:
    """What devices lost in worth in a period, straight line, by whole days. Devices without a price, date, life or residual are named."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_period_options(parser, None)
        parser.add_argument("--by", default="owner", choices=("owner", "model", "device", "month"), help="a row for each (owner)")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.assets.depreciation import depreciation_report

        config = load_config(args.config)
        period = parse_period(args.start, args.end, args.time_zone or config.accounting.time_zone, SystemClock().wall_us())
        write(depreciation_report(_devices(args, config), period, args.by), args.format, args.output)
        return 0


class AssetsMatrix:
    """Whose cards each tenant used and what that cost, to the cent of chargeback; and who owes whom for it, netted."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_period_options(parser, None)
        add_rating_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        from dataclasses import replace

        from poolmeter.accounting.assets.matrix import crossed, matrix_of
        from poolmeter.accounting.chargeback import chosen_plan
        from poolmeter.accounting.source import ask

        config, root = load_config(args.config), CollectorData(data_folder(args.data)).store
        plan, warnings = chosen_plan(root, args.plan, config.accounting.plan)
        zone = args.time_zone or (plan.zone.key if plan.zone is not None else config.accounting.time_zone)
        period = parse_period(args.start, args.end, zone, SystemClock().wall_us())
        owners = {str(row["uuid"]): None if row["owner"] is None else str(row["owner"]) for row in _register(args, config)}
        report = ask(root, lambda connection: matrix_of(connection, period, plan, owners, args.basis))
        report = replace(report, warnings=(*warnings, *report.warnings))
        write(crossed(report) if args.format == "table" else report, args.format, args.output)
        return 0
