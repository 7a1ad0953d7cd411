"""load_curve: a recorded load of three days, with a line for each minute, made from a seed.

    load_curve.py SEED

The load has a daily wave, noise, a job of twelve minutes at every full hour, and bursts at random times. It is the recording of
docs/SCALING.md.
"""
import json
import math
import random
import sys

DAY = 1440
r = random.Random(int(sys.argv[1]))
burst = 0
for minute in range(3 * DAY):
    if burst == 0 and r.random() < 1 / 700:
        burst = 15
    burst = max(burst - 1, 0)
    demand = 2.4 - 1.6 * math.cos(2 * math.pi * minute / DAY) + 0.15 * r.uniform(-1, 1) + (1.2 if burst else 0)
    demand += 1.6 if minute % 60 < 12 else 0
    load = round(max(demand, 0) / 10, 4)  # there are ten nodes
    print(json.dumps({"cpu": load, "memory": load, "queue": load, "nodes": 10}))
