"""Packs and unpacks many GPU arrays with one kernel launch."""
