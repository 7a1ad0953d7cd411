#!/usr/bin/env python3
"""Reads the TensorBoard event files of a run with its own decoder, checks their CRCs, and compares every number with the
run's log: event_files.py FOLDER LOG. Prints the number of compared values; exits 1 at the first difference."""
import glob
import json
import struct
import sys

TABLE = []
for i in range(256):
    for _ in range(8):
        i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
    TABLE.append(i)


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        n, head = struct.unpack("<QI", data[:12])
        body, tail = data[12:12 + n], struct.unpack("<I", data[12 + n:16 + n])[0]
        assert head == masked_crc(data[:8]) and tail == masked_crc(body), "a CRC is wrong"
        yield body
        data = data[16 + n:]


def varint(data):
    value = shift = used = 0
    while True:
        value |= (data[used] & 127) << shift
        used, shift = used + 1, shift + 7
        if data[used - 1] < 128:
            return value, data[used:]


def fields(data):
    while data:
        key, data = varint(data)
        if key & 7 == 0:
            value, data = varint(data)
        elif key & 7 == 2:
            n, data = varint(data)
            value, data = data[:n], data[n:]
        else:
            n = {1: 8, 5: 4}[key & 7]
            value, data = struct.unpack("<d" if n == 8 else "<f", data[:n])[0], data[n:]
        yield key >> 3, value


def scalars(folder):
    """[(step, {tag: number})] of all files in the order of their names; checks what begins each."""
    out = []
    for path in sorted(glob.glob(folder + "/events.out.tfevents.*")):
        events = [dict(fields(r)) for r in records(open(path, "rb").read())]
        assert events[0][3] == b"brain.Event:2" and dict(fields(events[1][7])) == {1: 1}, "no version or START"
        assert all(e[1] > 1.6e9 for e in events), "a time is wrong"
        for e in events[2:]:
            values = [dict(fields(v)) for _, v in fields(e[5])]
            out.append((e[2], {v[1].decode(): v[2] for v in values}))
    return out


def flat(line, prefix=""):
    for key, value in line.items():
        if isinstance(value, dict):
            yield from flat(value, prefix + key + "/")
        elif isinstance(value, (int, float)):
            yield prefix + key, value


def logged(path):
    """The same of train.jsonl or of the log.jsonl of pretrain, whose accuracies have a separate line."""
    out = []
    for line in map(json.loads, open(path)):
        if "accuracy_at" in line:
            out.append((line.pop("accuracy_at"), dict(flat({"accuracy": line}))))
        elif "step" in line or "update" in line:
            out.append((line["step"] if "step" in line else line.pop("update"), dict(flat(line))))
    return out


assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
got, want, n = scalars(sys.argv[1]), logged(sys.argv[2]), 0
if [step for step, _ in got] != [step for step, _ in want]:
    sys.exit("steps %s and %s" % ([s for s, _ in got], [s for s, _ in want]))
for (step, a), (_, b) in zip(got, want):
    for tag in ("step", "seconds", "cpu_seconds"):  # pretrain does not write its times
        b.pop(tag, None) if tag not in a else None
    if set(a) - {"lr"} != set(b) - {"lr"}:
        sys.exit("step %d: tags %s and %s" % (step, sorted(a), sorted(b)))
    for tag, value in b.items():
        n += 1
        if abs(a[tag] - value) > 1e-3 * max(abs(value), 1e-3):
            sys.exit("step %d, %s: %g and %g" % (step, tag, a[tag], value))
print(n)
