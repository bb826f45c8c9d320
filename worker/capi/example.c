/* Averages two gradients over the workers of a job, for some rounds.

   gradwire-launch --config configs/onebit.yaml --free-port -- gradwire-c-example
   Exit codes as those of every Gradwire program (gradwire_exit_code). */
#include <gradwire/gradwire.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kElements = 65536, kRounds = 20 };

static int failed(const char* what, gradwire_status status, int started) {
  fprintf(stderr, "%s: %s\n", what, gradwire_last_error());
  return gradwire_exit_code(status, started);
}

static int wrong(const char* what, double got, double expected) {
  fprintf(stderr, "%s: got %g, expected %g\n", what, got, expected);
  return EXIT_FAILURE;
}

/* The first `count` numbers of what has the sign of sin(i) and the size `size`. */
static void fill(float* values, size_t count, float size) {
  for (size_t i = 0; i < count; ++i) values[i] = sin((double)i) < 0 ? -size : size;
}

static int run(gradwire_client* client, float* weight, float* bias, float* result) {
  const uint32_t rank = gradwire_rank(client);
  const uint32_t size = gradwire_size(client);
  const float average = (float)(size + 1) / 2;
  gradwire_status status = GRADWIRE_OK;

  /* All start from what rank 0 has. */
  double start = rank == 0 ? 0.25 : -1.0;
  status = gradwire_broadcast(client, "start", &start, sizeof start, 0);
  if (status != GRADWIRE_OK) return failed("broadcast", status, 1);
  if (start != 0.25) return wrong("broadcast", start, 0.25);

  /* Together, so that the small one can travel with others. */
  const uint64_t matrix[2] = {kElements / 256, 256};
  const uint64_t vector[1] = {256};
  const gradwire_tensor tensors[2] = {
      {"layer.weight", matrix, 2, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 1},
      {"layer.bias", vector, 1, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 0},
  };
  uint32_t ids[2];
  status = gradwire_declare(client, tensors, 2, ids);
  if (status != GRADWIRE_OK) return failed("declare", status, 1);

  for (int round = 0; round < kRounds; ++round) {
    /* Rank r has +-(r + 1), so the average is +-(size + 1) / 2. Values of one size are what onebit
       reproduces exactly, up to rounding. */
    fill(weight, kElements, (float)(rank + 1));
    fill(bias, 256, (float)(rank + 1));
    gradwire_handle handles[2];
    status =
        gradwire_push_pull(client, ids[0], weight, result, kElements * sizeof *weight, &handles[0]);
    if (status != GRADWIRE_OK) return failed("push_pull of layer.weight", status, 1);
    /* In place. */
    status = gradwire_push_pull(client, ids[1], bias, bias, 256 * sizeof *bias, &handles[1]);
    if (status != GRADWIRE_OK) return failed("push_pull of layer.bias", status, 1);
    status = gradwire_end_step(client);
    if (status != GRADWIRE_OK) return failed("end_step", status, 1);
    for (int i = 0; i < 2; ++i) {
      status = gradwire_wait(client, handles[i], -1);
      if (status != GRADWIRE_OK) return failed("wait", status, 1);
    }
    fill(weight, kElements, average);
    for (size_t i = 0; i < kElements; ++i) {
      if (fabsf(result[i] - weight[i]) > 1e-3f) return wrong("weight", result[i], weight[i]);
    }
    for (size_t i = 0; i < 256; ++i) {
      if (fabsf(bias[i] - weight[i]) > 1e-3f) return wrong("bias", bias[i], weight[i]);
    }
  }

  status = gradwire_barrier(client);
  if (status != GRADWIRE_OK) return failed("barrier", status, 1);
  gradwire_stats stats;
  status = gradwire_get_stats(client, &stats);
  if (status != GRADWIRE_OK) return failed("stats", status, 1);
  printf("rank %u of %u: %d rounds, pushed %.0f kB as %.0f kB\n", rank, size, kRounds,
         (double)stats.raw_push_bytes / 1e3, (double)stats.sent_bytes / 1e3);
  status = gradwire_close(client);
  return status == GRADWIRE_OK ? EXIT_SUCCESS : failed("close", status, 1);
}

int main(void) {
  if (gradwire_abi_version() != GRADWIRE_ABI_VERSION) {
    fprintf(stderr, "libgradwire.so has interface %u, this program was compiled for %u\n",
            gradwire_abi_version(), GRADWIRE_ABI_VERSION);
    return EXIT_FAILURE;
  }
  gradwire_client* client = NULL;
  const gradwire_status status = gradwire_init(NULL, NULL, 0, -1, &client);
  if (status != GRADWIRE_OK) return failed("init", status, 0);
  float* weight = malloc(kElements * sizeof *weight);
  float* bias = malloc(256 * sizeof *bias);
  float* result = malloc(kElements * sizeof *result);
  int code = EXIT_FAILURE;
  if (weight != NULL && bias != NULL && result != NULL) code = run(client, weight, bias, result);
  /* Before the memory: it may still be read until then. */
  gradwire_free(client);
  free(result);
  free(bias);
  free(weight);
  return code;
}
