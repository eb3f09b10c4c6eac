#!/bin/bash
# train.sh LIMIT LANE... ; lane = job:SECONDS+job:SECONDS ; first lane on GPU 0, second on GPU 1; job@01 sees both. "wait=job" waits for a job's end.
set -u
SEED=${SEED:-0}; LIMIT=$1; shift
T0=$(date +%s); ROOT=$PWD; export SEED
mkdir -p /tmp/result /tmp/site; 
[ -e /tmp/site/pydantic ] || xz -T8 -dc .gpu/site.tar.xz | tar x -C /tmp/site
[ -f .gpu/fa3.so.xz ] && { (xz -dkc .gpu/fa3.so.xz > /tmp/fa3.so) & }
[ -f .gpu/fi_cache.tar.xz ] && { mkdir -p /tmp/fi; tar xJf .gpu/fi_cache.tar.xz -C /tmp/fi; }
wait
export PYTHONPATH=$ROOT:/tmp/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fi FLASHINFER_DISABLE_VERSION_CHECK=1
[ -f /tmp/fa3.so ] && export LEANBENCH_FA3_LIBRARY=/tmp/fa3.so
export COLUMNS=160
echo "setup $(( $(date +%s)-T0 )) s"; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
runjob(){ # spec gpu
  local spec=$1 gpu=$2 lim name
  lim=${spec#*:}; name=${spec%%:*}
  case $lim in *@*) gpu=${lim#*@}; lim=${lim%@*};; esac
  mkdir -p /tmp/result/$name; local t=$(date +%s)
  ( cd $ROOT/.gpu/$name; export JOB=$PWD
    if [ -f src.tar.xz ]; then mkdir -p /tmp/src/$name; tar xJf src.tar.xz -C /tmp/src/$name; export ROOT=/tmp/src/$name PYTHONPATH=/tmp/src/$name:/tmp/site; fi
    OUT=/tmp/result/$name ROOT=$ROOT CUDA_VISIBLE_DEVICES=$gpu timeout -k 5 $lim bash ./run.sh > /tmp/result/$name/log.txt 2>&1; echo "rc $?" >> /tmp/result/$name/log.txt )
  echo "== $name on $gpu: $(( $(date +%s)-t )) s, $(tail -1 /tmp/result/$name/log.txt), ended at $(( $(date +%s)-T0 )) s"
  touch /tmp/result/$name.done
}
lane(){ local g=$1; shift; local IFS=+; for s in $1; do case $s in wait=*) while [ ! -e /tmp/result/${s#wait=}.done ]; do sleep 0.3; done;; *) runjob "$s" $g;; esac; done; }
g=0; for l in "$@"; do lane $g "$l" & g=$((g+1)); done
( sleep $((LIMIT - ($(date +%s)-T0))); echo LIMIT; pkill -f run.sh; ) & K=$!
for j in $(jobs -p); do [ $j = $K ] || wait $j; done; kill $K 2>/dev/null
cd /tmp/result
for d in */; do d=${d%/}; (cd $d; tar czf $OUT/$d.tgz . ); done
ls $OUT | wc -l; n=$(ls $OUT | wc -l); if [ $n -gt 7 ]; then cd $OUT; tar cf all.tar *.tgz; rm *.tgz; fi
for d in /tmp/result/*/; do echo "---- $(basename $d)"; tail -${TAIL:-12} $d/log.txt | cut -c1-220; done
