"""Stories and recordings of several agents on a running endpoint, and what memory saves them."""
