"""Load, measured: many streams at once, and run files of many requests. Not part of the suite.

    python3 -m tests.load streams --streams 128 --chunks-per-s 50 --seconds 10
    python3 -m tests.load files --requests 3000,10000,30000
"""
