"""Collectives on GPU arrays. cupy is imported by `device` alone, and by copy/compiler.py and nccl_library.py, which
`device` imports; the other modules run, and are tested, without it.
"""
