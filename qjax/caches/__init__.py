"""Where sequences can be found again. The caches know the layout, sequences and the page pool, and no model."""
