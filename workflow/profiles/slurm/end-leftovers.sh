#!/bin/bash
# Cancels the jobs that an earlier sweep of this folder left in the queue (they carry its name), and waits for their end.
scancel --name="$1"
for _ in $(seq 60); do
  [ -z "$(squeue --noheader --name="$1")" ] && exit 0
  sleep 1
done
echo "jobs named $1 are still in the queue" >&2
exit 1
