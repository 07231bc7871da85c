"""One module a revision. What was released is never changed."""
