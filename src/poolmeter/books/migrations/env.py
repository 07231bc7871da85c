"""Alembic's environment: revisions run in the transaction of whoever calls (`poolmeter.books.migrate`)."""

from alembic import context

from poolmeter.books.models import REVISION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=REVISION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
