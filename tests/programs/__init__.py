"""Whole programs, as users write them: the examples, short scripts, TensorFlow's tutorials, features of strategies,
and random programs. table.py has a row for each; few jobs run all of them (test_programs.py).
"""
