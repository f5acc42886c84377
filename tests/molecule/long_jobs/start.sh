#!/bin/sh
# Starts a command in a process group of its own and leaves it: start.sh PIDFILE LOG COMMAND...
pid_file=$1 log=$2
shift 2
setsid "$@" >"$log" 2>&1 </dev/null &
echo $! >"$pid_file"
