/*
 * pbft_replicas: the replicas of a node (pbft.h), one for each command that has chosen it.
 *
 * A node has a key pair, made at its start. A command publishes a group of keys; the node whose key
 * is in it runs a replica of the group. The entries are units and the SHA-256 of their results; the
 * replicas agree with those that the node has computed. One thread.
 */
#ifndef SHOAL_CLUSTER_PBFT_REPLICAS_H
#define SHOAL_CLUSTER_PBFT_REPLICAS_H

#include "cluster/bus.h"
#include "cluster/pbft_client.h"

/* The entry of a unit and its result; `unit` and `hash` are valid hashes. */
void pbft_unit_entry(const char *unit, const char *hash, struct pbft_entry *out);
/* Publishes a message of a group for a replica, PBFT_ALL or PBFT_CLIENT. */
int pbft_publish(struct bus *b, int to, const void *data, size_t len, struct error *err);
/* The message for `to`, or for all; false: it is for another. */
bool pbft_bus_message(const struct bus_message *m, int to, const uint8_t **data, size_t *len);

struct pbft_replicas;
/* Makes the keys and subscribes to groups and their messages; NULL: an error of the bus. */
struct pbft_replicas *pbft_replicas_new(struct bus *b, struct error *err);
void pbft_replicas_free(struct pbft_replicas *r);             /* NULL is allowed */
const char *pbft_replicas_key(const struct pbft_replicas *r); /* public, in hex */
/* Handles a message of the bus; those on other subjects are ignored. */
int pbft_replicas_message(struct pbft_replicas *r, const struct bus_message *m, struct error *err);
int pbft_replicas_tick(struct pbft_replicas *r, struct error *err);
/* The node has computed a unit; the vote for its result is added to the message's head. */
int pbft_replicas_computed(struct pbft_replicas *r, const char *unit, const struct buf *results,
                           json_t *head, struct error *err);

#endif
