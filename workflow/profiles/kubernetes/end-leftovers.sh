#!/bin/bash
# Deletes the Jobs, with their pods, that an earlier sweep of this folder left in the cluster.
kubectl delete jobs --selector="psd-sweep=$1" --ignore-not-found --cascade=foreground --wait=true
