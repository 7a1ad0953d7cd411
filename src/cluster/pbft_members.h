/*
 * pbft_members: the group of nodes that a command has chosen, with the command as its client
 * (pbft_client.h).
 *
 * The first n nodes become the members. The group is made when n nodes have joined, and made again
 * with another id when a member restarts with another key, or is replaced because it is lost; then
 * entries that are not committed are forgotten, and the caller proposes them again. One thread.
 */
#ifndef SHOAL_CLUSTER_PBFT_MEMBERS_H
#define SHOAL_CLUSTER_PBFT_MEMBERS_H

#include "cluster/coordinator.h"
#include "cluster/pbft_replicas.h"

struct pbft_members;
struct pbft_members *pbft_members_new(struct bus *b, int n, struct error *err);
void pbft_members_free(struct pbft_members *g); /* NULL is allowed */
/* A node sends a heartbeat with its key. Returns whether it is a member. `lost` says whether a
 * member may be replaced. *made: a group has been made. */
bool pbft_members_heard(struct pbft_members *g, const char *node, const char *key,
                        bool (*lost)(void *ctx, const char *node), void *ctx, bool *made);
bool pbft_members_complete(const struct pbft_members *g);
/* The vote of a member for its result of a unit. False: it is not that. */
bool pbft_members_vote(struct pbft_members *g, const char *node, const char *vote, const char *unit,
                       const char *hash);
void pbft_members_propose(struct pbft_members *g, const char *unit, const char *hash);
void pbft_members_message(struct pbft_members *g, const struct bus_message *m);
/* Sends the messages that are due, and calls `committed` for each unit that has been committed. */
int pbft_members_send(struct pbft_members *g, void (*committed)(void *ctx, const char *unit),
                      void *ctx, struct error *err);
void pbft_members_report(const struct pbft_members *g); /* keys, and which member was caught */

#endif
