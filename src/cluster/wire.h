/*
 * wire: the subjects and queues of a cluster, and the messages on them. A message is a line of
 * JSON, and after it, if the message carries one, a body.
 *
 *   cluster.nodes       {name, identity, threads, load, key, level, adapters: hashes}: a node
 * joins, or sends a heartbeat cluster.results.ID  a queue of a command: {node, unit, vote} and the
 * results; or {node, unit, error}; of a streamed unit also {cached, dropped}, as in struct
 * engine_request cluster.parts.ID    {node, unit, at} and tokens of a streamed unit from position
 * `at` on, or nothing: it is being computed cluster.work.NODE   a queue: {unit, results: the queue
 * for them, parts: the subject for them, if the unit is streamed} and the calls cluster.wanted
 * {node, hash}: a node needs an adapter cluster.node.NODE   {hash, at, size} and a part of the
 * adapter's bytes; or {hash, error}; or {cancel: unit} cluster.group       {nonce, client, keys}: a
 * group of replicas, by a command with --verify pbft cluster.pbft        not JSON: the receiver (a
 * byte) and a message of pbft_wire.h
 */
#ifndef SHOAL_CLUSTER_WIRE_H
#define SHOAL_CLUSTER_WIRE_H

#include "cluster/bus.h"

#define SUBJECT_NODES "cluster.nodes"
#define SUBJECT_WANTED "cluster.wanted"
#define SUBJECT_NODE "cluster.node."
#define SUBJECT_PARTS "cluster.parts."
#define SUBJECT_GROUP "cluster.group"
#define SUBJECT_PBFT "cluster.pbft"
#define QUEUE_RESULTS "cluster.results."
#define QUEUE_WORK "cluster.work."

enum { PART_BYTES = 512 << 10 }; /* bytes of an adapter in one message */

/* Appends the line of `head`, of which it takes ownership, and the body. */
void wire_write(struct buf *out, json_t *head, const void *body, size_t len);
/* Reads the line; *body and *len receive what follows. NULL: the line is not a JSON object. */
json_t *wire_read(const struct bus_message *m, const uint8_t **body, size_t *len);
/* Publishes a message, of whose head it takes ownership. */
int wire_publish(struct bus *b, const char *subject, json_t *head, const void *body, size_t len,
                 struct error *err);

#endif
