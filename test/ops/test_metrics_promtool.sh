#!/bin/sh
# test_metrics_promtool: Prometheus' own tool on the text of Shoal's metrics, and GPU metrics from a substitute for
# NVIDIA's library.
#
# promtool (Debian package prometheus) parses the text of a registry with all metrics, and may warn only about names
# that other programs define; it loads the alert rules, which fire and resolve as expected; and it computes the
# quantiles that test_metrics expects.
set -u
cd "$(dirname "$0")/../.." || exit 1
shoal=${SHOAL:-build/shoal}
program=$(dirname "$shoal")/test_metrics
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
failed=0

# verdict NAME STATUS FILE: prints the file if the test failed.
verdict() {
    if [ "$2" = 0 ]; then
        echo "ok $1"
    else
        echo "not ok $1: $(head -n 20 "$3" | tr '\n' ' ')"
        failed=1
    fi
}

# Two GPUs; the library does not report the utilisation of the second.
cat >"$dir/nvml.c" <<'END'
#include <stdint.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(uintptr_t)(i + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *d, unsigned r[2]) {
    r[0] = 37, r[1] = 5;
    return d == (void *)1 ? 0 : 3;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long m[3]) {
    m[0] = 80000000000, m[1] = 79000000000, m[2] = 1000000000 * (uintptr_t)d;
    return 0;
}
END
cat >"$dir/gpu.expected" <<'END'
shoal_gpu_busy_ratio{gpu="0"} 0.37
shoal_gpu_memory_used_bytes{gpu="0"} 1000000000
shoal_gpu_memory_used_bytes{gpu="1"} 2000000000
shoal_gpu_memory_bytes{gpu="0"} 80000000000
shoal_gpu_memory_bytes{gpu="1"} 80000000000
END
${CC:-cc} -shared -fPIC -o "$dir/libnvidia-ml.so.1" "$dir/nvml.c" &&
    LD_LIBRARY_PATH="$dir" "$program" --exposition | grep '^shoal_gpu_[a-z_]*{gpu="[0-9]' >"$dir/gpu"
diff "$dir/gpu.expected" "$dir/gpu" >"$dir/out" 2>&1
verdict "metrics of GPUs" $? "$dir/out"

if ! command -v promtool >/dev/null 2>&1; then
    echo "skip promtool: not installed (Debian package prometheus)"
    exit $failed
fi

# 0: no warnings, 3: warnings, else: a parse error.
"$program" --exposition >"$dir/metrics"
promtool check metrics <"$dir/metrics" >"$dir/out" 2>&1
status=$?
grep -v -E '^(vllm|llamacpp):[a-z0-9_]+ (metric names should not contain|non-counter metrics should not have)' \
    "$dir/out" >"$dir/complaints"
[ $status = 3 ] && [ -s "$dir/out" ] && [ ! -s "$dir/complaints" ]
verdict "promtool check metrics" $? "$dir/complaints"

# promtool reads OpenMetrics only to import old samples.
"$program" --openmetrics | sed '/^#/!s/$/ 1700000000/' >"$dir/openmetrics"
promtool tsdb create-blocks-from openmetrics "$dir/openmetrics" "$dir/tsdb" >"$dir/out" 2>&1
verdict "promtool reads OpenMetrics" $? "$dir/out"

"$shoal" metrics --rules >"$dir/rules.yaml" && promtool check rules "$dir/rules.yaml" >"$dir/out" 2>&1
verdict "promtool check rules" $? "$dir/out"

# One healthy server (b) and one with every problem (a).
cat >"$dir/test.yaml" <<'END'
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'shoal_build_info{instance="b"}', values: '1x60'}
      - {series: 'murmurnet_active_nodes{instance="a"}', values: '0x60'}
      - {series: 'murmurnet_active_nodes{instance="b"}', values: '1x60'}
      - {series: 'process_cpu_seconds_total{instance="a"}', values: '0+108x60'}
      - {series: 'process_cpu_seconds_total{instance="b"}', values: '0+90x60'}
      - {series: 'shoal_cpus{instance="a"}', values: '2x60'}
      - {series: 'shoal_cpus{instance="b"}', values: '2x60'}
      - {series: 'shoal_host_memory_bytes{instance="a"}', values: '100x60'}
      - {series: 'shoal_host_memory_bytes{instance="b"}', values: '100x60'}
      - {series: 'shoal_host_memory_available_bytes{instance="a"}', values: '14x60'}
      - {series: 'shoal_host_memory_available_bytes{instance="b"}', values: '16x60'}
      - {series: 'process_resident_memory_bytes{instance="a"}', values: '96x60'}
      - {series: 'process_resident_memory_bytes{instance="b"}', values: '96x60'}
      - {series: 'shoal_memory_budget_bytes{instance="a"}', values: '100x60'}
      - {series: 'shoal_requests_received_total{instance="a"}', values: '0+20x60'}
      - {series: 'shoal_requests_failed_total{instance="a"}', values: '0+3x60'}
      - {series: 'shoal_requests_received_total{instance="b"}', values: '0+20x60'}
      - {series: 'shoal_requests_failed_total{instance="b"}', values: '0+1.5x60'}
      - {series: 'shoal_requests_total{instance="a",adapter="x"}', values: '0+10x60'}
      - {series: 'shoal_requests_total{instance="a",adapter="y"}', values: '0+10x60'}
      - {series: 'shoal_request_loops_total{instance="a",adapter="y"}', values: '0+3x60'}
      - {series: 'shoal_requests_total{instance="b",adapter="x"}', values: '0+10x60'}
      - {series: 'shoal_requests_total{instance="b",adapter="y"}', values: '0+10x60'}
      - {series: 'shoal_request_loops_total{instance="b",adapter="x"}', values: '0+1.5x60'}
      - {series: 'vllm:num_requests_waiting{instance="a"}', values: '51x60'}
      - {series: 'vllm:num_requests_waiting{instance="b"}', values: '50x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a",le="10.0"}', values: '0+94x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a",le="20.0"}', values: '0+100x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="a",le="+Inf"}', values: '0+100x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="b",le="10.0"}', values: '0+96x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="b",le="20.0"}', values: '0+100x60'}
      - {series: 'vllm:time_to_first_token_seconds_bucket{instance="b",le="+Inf"}', values: '0+100x60'}
      - {series: 'shoal_train_loss{instance="a",job="1"}', values: 'NaN+0x60'}
      - {series: 'shoal_train_loss{instance="a",job="2"}', values: 'Inf+0x60'}
      - {series: 'shoal_train_loss{instance="b",job="1"}', values: '2.5x60'}
      - {series: 'shoal_jobs_ended_total{instance="a",kind="train",state="failed"}', values: '_x29 1x30'}
      - {series: 'shoal_jobs_ended_total{instance="a",kind="eval",state="failed"}', values: '1x29 2x30'}
      - {series: 'shoal_jobs_ended_total{instance="b",kind="train",state="failed"}', values: '1x60'}
      - {series: 'shoal_jobs_ended_total{instance="b",kind="train",state="done"}', values: '0+1x60'}
      - {series: 'shoal_world_decisions_per_second{instance="a",job="1"}', values: '0x60'}
      - {series: 'shoal_world_decisions_per_second{instance="b",job="1"}', values: '200+1x60'}
      - {series: 'process_start_time_seconds{instance="a"}', values: '1x8 2x8 3x8 4x8 5x20'}
      - {series: 'process_start_time_seconds{instance="b"}', values: '1x60'}
    alert_rule_test:
END
# fires NAME SEVERITY [LABELS...]: exactly these alerts of that name after 40 minutes.
fires() {
    name=$1 severity=$2
    shift 2
    echo "      - eval_time: 40m"
    echo "        alertname: $name"
    echo "        exp_alerts:"
    summary=$(sed -n "/alert: \"$name\"/,/summary:/s/.*summary: //p" "$dir/rules.yaml")
    for labels; do
        echo "          - {exp_labels: {severity: $severity, $labels}, exp_annotations: {summary: $summary}}"
    done
}
{
    fires ShoalAbsent critical
    fires ShoalNoActiveNodes critical 'instance: a'
    fires ShoalCpuHigh warning 'instance: a'
    fires ShoalMemoryHigh warning 'instance: a'
    fires ShoalMemoryBudget warning 'instance: a'
    fires ShoalErrorRatio critical 'instance: a'
    fires ShoalLoopRatio warning 'instance: a'
    fires ShoalQueueWaiting warning 'instance: a'
    fires ShoalFirstTokenSlow warning 'instance: a'
    fires ShoalLossNaN critical 'instance: a, job: 1' 'instance: a, job: 2'
    fires ShoalJobFailed warning 'instance: a, kind: train, state: failed' \
        'instance: a, kind: eval, state: failed'
    fires ShoalWorldStalled warning 'instance: a, job: 1'
    fires ShoalRestartsOften warning 'instance: a'
    cat <<'END'
  - interval: 1m
    input_series: []
    alert_rule_test:
      - eval_time: 10m
        alertname: ShoalAbsent
        exp_alerts:
          - {exp_labels: {severity: critical}, exp_annotations: {summary: "No Shoal server answers."}}
  - interval: 1m
    input_series:
      - {series: 'h_bucket{le="1.0"}', values: 2}
      - {series: 'h_bucket{le="2.0"}', values: 2}
      - {series: 'h_bucket{le="5.0"}', values: 6}
      - {series: 'h_bucket{le="10.0"}', values: 6}
      - {series: 'h_bucket{le="20.0"}', values: 7}
      - {series: 'h_bucket{le="+Inf"}', values: 8}
    promql_expr_test:
      - {expr: 'histogram_quantile(0.125, h_bucket)', exp_samples: [{value: 0.5, labels: '{}'}]}
      - {expr: 'histogram_quantile(0.25, h_bucket)', exp_samples: [{value: 1, labels: '{}'}]}
      - {expr: 'histogram_quantile(0.5, h_bucket)', exp_samples: [{value: 3.5, labels: '{}'}]}
      - {expr: 'histogram_quantile(0.8125, h_bucket)', exp_samples: [{value: 15, labels: '{}'}]}
      - {expr: 'histogram_quantile(0.99, h_bucket)', exp_samples: [{value: 20, labels: '{}'}]}
END
} >>"$dir/test.yaml"
promtool test rules "$dir/test.yaml" >"$dir/out" 2>&1
verdict "promtool test rules" $? "$dir/out"
exit $failed
