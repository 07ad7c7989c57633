"""`mpistrat timeline`: summarise a timeline as text, and as a page with charts."""
