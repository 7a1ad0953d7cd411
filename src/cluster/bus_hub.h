/*
 * bus_hub: the hub of a local bus, a thread that stores queues and passes messages on.
 */
#ifndef SHOAL_CLUSTER_BUS_HUB_H
#define SHOAL_CLUSTER_BUS_HUB_H

#include "cluster/bus_frame.h"

struct bus_hub;
/* Listens on a Unix socket with a new name, for processes of this user. */
struct bus_hub *bus_hub_start(struct error *err);
const char *bus_hub_name(const struct bus_hub *h); /* name of the socket: "@shoal-…" */
void bus_hub_stop(struct bus_hub *h);              /* disconnects all members; NULL is allowed */

#endif
