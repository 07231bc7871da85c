"""What the enforcer's events tell the books: the outcome of decisions."""

from poolmeter.books.writer import Books
from poolmeter.collector.store import Batch
from poolmeter.model.usage import RecordKind


def has_outcomes(batch: Batch) -> bool:
    """Whether `take_outcomes` has anything to do."""
    outcome = batch.checked.good.column("outcome")
    return int(outcome.null_count) < len(outcome)


def take_outcomes(books: Books, batch: Batch) -> int:
    """Enter the outcomes among a batch's events; how many were news. Known rows count too: the last time may have been cut short."""
    import pyarrow.compute as pc

    table = batch.checked.good
    events = table.filter(pc.equal(table.column("kind"), RecordKind.EVENT.value))
    wanted = events.filter(pc.and_(pc.is_valid(events.column("decision_id")), pc.is_valid(events.column("outcome"))))
    news = 0
    for row in wanted.select(["event", "decision_id", "outcome", "reason", "at_us"]).to_pylist():
        if row["event"] == "decision":
            news += books.record_outcome(row["decision_id"], batch.node, row["outcome"], row["reason"], row["at_us"])
    return news
