"""How often the verdict on the answers is right: honest and broken engines, simulated by the thousand.

    python3 -m tests.losslessness --runs 1000          the tables, as Markdown (a few minutes)
    python3 -m tests.losslessness --coverage           how often the printed 95 % intervals hold the truth

The engines were written from what real ones do (published prefix agreements; margins and log-probabilities seen on real
servers), and were not changed to please the detector. Where the detector falls short the table says so.
"""
