export PYTHONUNBUFFERED=1 PYTHONPATH=.gpu; rm -f /tmp/done
n=$(grep -c '^[sr]s' .gpu/$1)
for i in 1 2 3 4 5; do timeout 100 python3 .gpu/run_ss.py .gpu/$1 2>&1 | tee -a $OUT/log; [ $(wc -l < /tmp/done) -ge $n ] && break; done; true
