#!/usr/bin/env bash
# Stop the Slurm that slurm_up.sh started under DIR, by the pids that it wrote, with its jobs; then delete DIR.
#   usage: slurm_down.sh DIR [PID]     with PID: once that process has ended, however it ended
set -uo pipefail
[ -z "${2:-}" ] || tail --pid="$2" -f /dev/null
dir=$(cd "$1" 2>/dev/null && pwd) || exit 0
export SLURM_CONF=$dir/slurm.conf

pid_of() {  # the pids in DIR/run/NAME*.pid, if they are still that program
    local pid
    for pid in $(cat "$dir/run/$1".pid "$dir/run/$1"-*.pid 2>/dev/null); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] && echo "$pid"
    done
}

if [ -n "$(pid_of slurmctld)" ]; then
    timeout 20 scancel --user="$(id -un)"
    for _ in $(seq 50); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
fi
for group in "slurmd slurmctld" "slurmdbd" "mariadbd munged"; do  # slurmctld tells slurmdbd, which tells MariaDB
    pids=""
    for d in $group; do pids+=" $(pid_of "$d")"; done
    [ -n "${pids// /}" ] || continue
    kill $pids
    for _ in $(seq 100); do kill -0 $pids 2>/dev/null || break; sleep 0.1; done
    for pid in $pids; do kill -9 "$pid" 2>/dev/null && echo "pid $pid of $group had to be killed" >&2; done
done
rm -rf "$dir"
