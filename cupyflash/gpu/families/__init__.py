"""The kernel families, a room each: what it objects to, its tiles as named rows, and how it plans a problem it takes.

`gpu/plan.py` lists them and says what each has.
"""
