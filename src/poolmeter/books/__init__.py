"""Books: what people and the recommender write and must be transactional; so far decisions and their log.

`poolmeter.books.writer.Books` is the one writer; `models` the tables; `states` which change of state is legal; `disk` where they may lie.
"""
