"""faulty: a node that answers every unit with a wrong result, for test_cluster.sh.

    faulty_node.py ADDRESS SECONDS

Joins the bus (src/cluster/bus_frame.h), copies the identity of another node, and gives the first probability of each
result another value. Prints the number of units that it got.
"""
import json
import re
import socket
import struct
import sys
import time

SUBSCRIBE, CONSUME, PUBLISH, ENQUEUE, _, ACK = range(1, 7)
MESSAGE, ITEM = 9, 10
address, seconds = sys.argv[1].removeprefix("unix:"), float(sys.argv[2])
bus = socket.socket(socket.AF_UNIX)
bus.connect("\0" + address[1:])


def send(op, name, data=b"", number=0):
    body = struct.pack("<BQB", op, number, len(name)) + name.encode() + data
    bus.sendall(struct.pack("<I", len(body)) + body)


def frames():
    got = b""
    while True:
        while len(got) < 4 or len(got) < 4 + struct.unpack("<I", got[:4])[0]:
            more = bus.recv(1 << 16)
            if not more:
                return
            got += more
        size = struct.unpack("<I", got[:4])[0]
        op, number, n = struct.unpack("<BQB", got[4:14])
        yield op, number, got[14:14 + n].decode(), got[14 + n:4 + size]
        got = got[4 + size:]


def wrong_result(call):
    n = len(call["inputs"].get("choices", []))
    return {"out": [], "logprobs": [], "top": [], "prompt_logprobs": [], "prompt_top": [], "choice_logprobs": [-1.5] * n,
            "choice_probs": [1.0] * n, "choice": 0 if n else -1, "finish": "choice", "prefilled": 1, "generated": 0}


send(SUBSCRIBE, "cluster.nodes")
send(CONSUME, "cluster.work.faulty", number=8)
units, joined, until = 0, False, time.time() + seconds
bus.settimeout(seconds)
try:
    for op, number, name, data in frames():
        if op == MESSAGE and not joined:
            sign = json.loads(data)
            send(PUBLISH, "cluster.nodes", json.dumps({**sign, "name": "faulty"}).encode() + b"\n")
            joined = True
        if op == ITEM:
            head, body = data.split(b"\n", 1)
            unit, queue = json.loads(head)["unit"], json.loads(head)["results"]
            results = json.dumps([wrong_result(c) for c in json.loads(body)], separators=(",", ":"))
            item = json.dumps({"node": "faulty", "unit": unit}).encode() + b"\n" + re.sub(r"(\d)\.0\b", r"\1.0", results).encode()
            id_ = f"{unit} faulty".encode()
            send(ENQUEUE, queue, bytes([len(id_)]) + id_ + item)
            send(ACK, "", number=number)
            units += 1
        if time.time() > until:
            break
except (OSError, TimeoutError):
    pass
print(units)
