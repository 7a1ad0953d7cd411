#!/bin/sh
# compose_scale: sets the number of servers of examples/compose.yaml; `shoal autoscale --command` runs it with the number.
exec docker compose -f "$(dirname "$0")/compose.yaml" up -d --no-recreate --scale "serve=$1" serve
