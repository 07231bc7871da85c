"""The accounting commands: usage, chargeback, FOCUS export, and those of the recommender (`poolmeter.accounting.recommend.commands`)."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poolmeter.accounting.dimensions import BY, CHARGE_BY, Filters, parse_by
from poolmeter.accounting.recommend.commands import Apply, Approve, History, Recommend, Reject
from poolmeter.clock import SystemClock
from poolmeter.config import load_config
from poolmeter.period import Period, add_period_options, parse_period
from poolmeter.places import CollectorData, data_folder
from poolmeter.report import write

__all__ = ["Apply", "Approve", "Chargeback", "FocusExport", "History", "PlanCheck", "Recommend", "Reject", "Usage"]


def _add_question(parser: argparse.ArgumentParser, by: Sequence[str] = BY) -> None:
    add_period_options(parser, by, "tenant")
    _add_filters(parser)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", action="append", default=[], metavar="T", help="only this tenant (repeatable)")
    parser.add_argument("--node", action="append", default=[], metavar="N", help="only this node (repeatable)")
    parser.add_argument("--pool", action="append", default=[], metavar="P", help="only this pool (repeatable)")


def add_rating_options(parser: argparse.ArgumentParser) -> None:
    """--plan and --basis of a command that rates."""
    parser.add_argument("--plan", metavar="FILE", type=Path, help="price plan (accounting.plan of the configuration)")
    parser.add_argument("--basis", choices=("allocated", "used"), help="charge what was promised, or what was used (the plan's)")


def _filters(args: argparse.Namespace) -> Filters:
    return Filters(tenant=tuple(args.tenant), node=tuple(args.node), pool=tuple(args.pool))


def _period(args: argparse.Namespace, zone: str) -> Period:
    return parse_period(args.start, args.end, zone if args.time_zone is None else args.time_zone, SystemClock().wall_us())


class Usage:
    """Who used what: allocated and used device-hours, memory, energy, throttling, refused allocations.

    Rows are sums over the allocations' minute records; totals are the capacity identity of the devices in whole microseconds.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        _add_question(parser)

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.usage import usage_report

        config = load_config(args.config)
        by, period = parse_by(args.by), _period(args, config.accounting.time_zone)
        report = usage_report(CollectorData(data_folder(args.data)).store, period, by, _filters(args))
        write(report, args.format, args.output)
        return 0


class Chargeback:
    """What it cost, and whose it is: tenants, idle, unallocated and overhead sum to the cost of the pool exactly.

    Days are cut in --time-zone, else in the plan's, else in the configured one.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        _add_question(parser, CHARGE_BY)
        add_rating_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.chargeback import chargeback_for

        config = load_config(args.config)
        by = parse_by(args.by, CHARGE_BY)
        report = chargeback_for(
            CollectorData(data_folder(args.data)).store,
            lambda plan_zone: _period(args, plan_zone or config.accounting.time_zone),
            by,
            _filters(args),
            flag=args.plan,
            configured=config.accounting.plan,
            basis=args.basis,
        )
        write(report, args.format, args.output)
        return 0


class FocusExport:
    """The bill as FOCUS 1.4 Cost and Usage rows, CSV unless another format is asked for: the same amounts as chargeback, to the smallest unit.

    A row for each allocation, device, day and price, and for what nobody used.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_period_options(parser, None)
        _add_filters(parser)
        add_rating_options(parser)
        parser.add_argument(
            "--issuer", metavar="NAME", help="who bills: InvoiceIssuerName, ServiceProviderName, HostProviderName (the pool's name)"
        )

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.focus import focus_report

        config = load_config(args.config)
        report = focus_report(
            CollectorData(data_folder(args.data)).store,
            lambda plan_zone: _period(args, plan_zone or config.accounting.time_zone),
            flag=args.plan,
            configured=config.accounting.plan,
            basis=args.basis,
            issuer=args.issuer or config.accounting.issuer,
            filters=_filters(args),
        )
        # Sixty columns are no table for a terminal.
        write(report, "csv" if args.format == "table" else args.format, args.output)
        for warning in report.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return 0


class PlanCheck:
    """Check a price plan and show its calendar: which price is in force when.

    The file is read as chargeback reads it; what is wrong is named with its line. A row is a stretch of a local day; the table has the
    models side by side, the other formats a row for each.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", metavar="FILE", type=Path, help="price plan")
        parser.add_argument("--from", dest="start", metavar="TIME", help="start, inclusive, in the plan's zone (Monday of this week)")
        parser.add_argument("--to", dest="end", metavar="TIME", help="end, exclusive (a week after the start)")
        parser.add_argument(
            "--model", action="append", default=[], metavar="M", help="prices of this model (repeatable; the plan's patterns)"
        )

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.accounting.plan_check import calendar_period, plan_report
        from poolmeter.accounting.plans import load_plan

        plan = load_plan(args.file)
        period = calendar_period(plan, args.start, args.end, SystemClock().wall_us())
        write(plan_report(plan, period, args.model, wide=args.format == "table"), args.format, args.output)
        return 0
