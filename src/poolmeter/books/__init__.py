"""Books: what people and the recommender write and must be transactional: decisions, tokens, and the log of every change.

`writer.Books` is the one writer; `models` the tables, `migrations` how they came to be; `ledger` makes every change and enters it in the
log; `states` says which change of a decision's state is legal; `database` runs transactions on the back ends `sqlite` and `postgres`.
"""
