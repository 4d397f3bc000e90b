#!/bin/bash
# Says "running", "success" or "failed" of a Kubernetes Job; one that the cluster does not know has failed as far as anyone
# can tell. A cluster that cannot be reached says nothing of the job, so it counts as running.
found=$(kubectl get "$1" --ignore-not-found \
  -o 'jsonpath=known{range .status.conditions[*]} {.type}={.status}{end}') || { echo running; exit 0; }
case "$found" in
  *" Complete=True"*) echo success ;;
  "" | *" Failed=True"*) echo failed ;;
  *) echo running ;;
esac
