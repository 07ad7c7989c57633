"""`mpistrat timeline`: what a timeline says, as text and as a page with charts."""
