#!/bin/bash
# Says "running", "success" or "failed" of a Slurm job: from the queue while it remembers the job, else from accounting
# where the cluster has it. A job that neither knows has failed as far as anyone can tell: the next sweep repeats it.
state=$(squeue --noheader --states=all --format=%T --jobs="$1" 2>/dev/null)
[ -n "$state" ] || state=$(sacct --noheader --parsable2 --allocations --format=State --jobs="$1" 2>/dev/null | head -1)
case "$state" in
  PENDING | CONFIGURING | RUNNING | COMPLETING | SUSPENDED | REQUEUED | RESIZING) echo running ;;
  COMPLETED) echo success ;;
  *) echo failed ;;
esac
