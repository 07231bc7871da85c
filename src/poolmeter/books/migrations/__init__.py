"""How the tables of the books came to be: Alembic's environment and one file a revision, from the first to today's."""
