#!/usr/bin/env bash
# Start a Slurm under DIR, with accounting, without systemd and without touching /etc/slurm.
#   usage: slurm_up.sh DIR     then: . DIR/env     stop with: slurm_down.sh DIR
# One node, this machine, in the partitions cpu, gpu and preemptible; where namespaces may be made, the same machine once
# more as the node `another`, both in the partition `pair`. A node pretends to have two GPUs, and more cores and memory
# than the machine, so that jobs of any size start.
# Debian packages: slurmctld slurmd slurm-client munge slurmdbd mariadb-server
set -euo pipefail
# Programs on two nodes find each other by name, so the second one needs a name, and everybody a table with both.
if [ -z "${NAMESPACE:-}" ] && unshare --mount --uts true 2>/dev/null; then
    NAMESPACE=made exec unshare --mount "$0" "$@"
fi
dir=$(mkdir -p "$1" && cd "$1" && pwd)
me=$(id -un)
host=$(hostname -s)
[ ${#dir} -lt 80 ] || { echo "DIR is too long for a unix socket: $dir" >&2; exit 2; }
[ ! -e "$dir/env" ] || { echo "$dir is in use: run slurm_down.sh first" >&2; exit 2; }
umask 022
mkdir -p "$dir"/{run,log,state,db,bin}
chmod 755 "$dir" "$dir/run" "$dir/log"

read -r ctld_port d_port another_port dbd_port <<<"$(python3 -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*[one.getsockname()[1] for one in sockets])')"

wait_for() {  # wait_for SECONDS WHAT COMMAND...: poll every 0.1 s, each try 5 s at most
    local end=$((SECONDS + $1)) what=$2 err; shift 2
    until err=$(timeout 5 "$@" 2>&1 >/dev/null); do
        if [ $SECONDS -ge $end ]; then
            printf '%s did not come up: %s\nlast lines of the logs:\n' "$what" "$err" >&2
            for f in "$dir"/log/*.log; do echo "== $f"; tail -n 15 "$f"; done >&2
            exit 1
        fi
        sleep 0.1
    done
}

# munge, with a key and a socket of its own
head -c 1024 /dev/urandom >"$dir/munge.key"; chmod 400 "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" \
    --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" --num-threads=2
wait_for 10 munged munge -n -S "$dir/run/munge.sock"

cat >"$dir/slurm.conf" <<CONF
ClusterName=testcluster
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again (120 s if not set)
AuthInfo=socket=$dir/run/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
PlugStackConfig=$dir/plugstack.conf
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
# no cgroups: follow processes through /proc; memory limits by polling (OverMemoryKill)
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
# short intervals, as this is a test; GPUs need cons_tres
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0,defer_batch=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=2
MinJobAge=300
OverTimeLimit=0
Waittime=0
UnkillableStepTimeout=20
JobRequeue=1
DefMemPerCPU=512
NodeName=DEFAULT CPUs=64 Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:2 State=UNKNOWN
NodeName=$host NodeAddr=127.0.0.1 Port=$d_port
NodeName=another NodeHostname=another NodeAddr=127.0.0.1 Port=$another_port
PartitionName=cpu Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=10 State=UP
PartitionName=gpu Nodes=$host Default=NO MaxTime=INFINITE PriorityTier=10 State=UP
PartitionName=preemptible Nodes=$host Default=NO MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=pair Nodes=$host,another Default=NO MaxTime=INFINITE PriorityTier=10 State=UP
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=$dbd_port
AccountingStoragePass=$dir/run/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
CONF
# A Count without File registers as no GPU, and a plain file gives no CUDA_VISIBLE_DEVICES; any two character devices do.
printf 'AutoDetect=off\nNodeName=%s,another Name=gpu File=/dev/null,/dev/zero\n' "$host" >"$dir/gres.conf"
: >"$dir/plugstack.conf"
export SLURM_CONF=$dir/slurm.conf

mariadb-install-db --no-defaults --user="$me" --datadir="$dir/db" --skip-test-db \
    --auth-root-authentication-method=normal --skip-name-resolve >"$dir/log/mariadb-install.log" 2>&1
setsid mariadbd --no-defaults --user="$me" --datadir="$dir/db" --socket="$dir/run/db.sock" \
    --pid-file="$dir/run/mariadbd.pid" --log-error="$dir/log/mariadbd.log" \
    --skip-networking --skip-grant-tables --skip-log-bin --innodb-buffer-pool-size=64M --innodb-log-file-size=64M \
    --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 --innodb-doublewrite=0 </dev/null >/dev/null 2>&1 &
wait_for 30 mariadbd mariadb-admin --no-defaults --socket="$dir/run/db.sock" ping
( umask 077; cat >"$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
DbdHost=localhost
CommunicationParameters=NoInAddrAny
DbdPort=$dbd_port
SlurmUser=$me
PidFile=$dir/run/slurmdbd.pid
LogFile=$dir/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct
CONF
)
# libmariadb takes the socket of "localhost" from MYSQL_UNIX_PORT
MYSQL_UNIX_PORT="$dir/run/db.sock" setsid slurmdbd -D </dev/null >"$dir/log/slurmdbd.out.log" 2>&1 &
wait_for 60 slurmdbd sacctmgr -n list cluster
sacctmgr -i -Q add cluster testcluster >/dev/null || true
sacctmgr -i -Q add account testacct cluster=testcluster Description=test Organization=test >/dev/null
sacctmgr -i -Q add user "$me" account=testacct >/dev/null

slurmctld -c
wait_for 30 slurmctld scontrol ping
slurmd
wait_for 30 slurmd sh -c "sinfo -h -n $host -t idle -o %t | grep -q idle"
if [ -n "${NAMESPACE:-}" ]; then
    printf '127.0.0.1 localhost %s another\n' "$host" >"$dir/hosts"
    mount --bind "$dir/hosts" /etc/hosts
    unshare --uts sh -c 'hostname another; exec slurmd'
    wait_for 30 "the second slurmd" sh -c "sinfo -h -n another -t idle -o %t | grep -q idle"
fi
# snakemake-executor-plugin-slurm-jobstep drops every SLURM_* variable, SLURM_CONF too, before it calls srun inside a
# job; so a srun that sets it again comes first in PATH, which sbatch --export=ALL hands to the job.
printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$dir/slurm.conf" "$(command -v srun)" >"$dir/bin/srun"
chmod +x "$dir/bin/srun"
printf 'export SLURM_CONF=%s\nexport PATH=%s:$PATH\n' "$dir/slurm.conf" "$dir/bin" >"$dir/env"
