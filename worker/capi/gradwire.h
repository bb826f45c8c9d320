/* gradwire.h: Gradwire for any language.

   A worker's connection to the servers of a job, behind a C interface that stays the same between
   versions (GRADWIRE_ABI_VERSION). No other symbol of libgradwire.so is visible.

   Every call returns a code; gradwire_last_error() says in words what was wrong, for the last
   failed call of the calling thread. No call exits or throws; the log goes to stderr, and the first
   gradwire_init of a process sets it up as log.level and log.format say. Except where it says
   otherwise every call is safe from any thread; calls for one tensor must not overlap.
   gradwire_declare, gradwire_broadcast, gradwire_barrier, gradwire_save_state and
   gradwire_load_state are collective: every worker makes them in the same order, and they block
   until all have.

   All memory is host memory. A NULL where one is not allowed is refused with
   GRADWIRE_INVALID_ARGUMENT, and so is every call in a process that was forked from the one that
   called gradwire_init: the client's threads did not come along. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GRADWIRE_ABI_VERSION 1

/* What a call came to. The numbers stay. */
typedef enum {
  GRADWIRE_OK = 0,
  GRADWIRE_INVALID_ARGUMENT = 1, /* the caller or the configuration is wrong */
  GRADWIRE_CORRUPT_DATA = 2,     /* bytes of a file or the network don't mean what they should */
  GRADWIRE_BUFFER_TOO_SMALL = 3,
  GRADWIRE_NOT_FOUND = 4,
  GRADWIRE_UNAVAILABLE = 5, /* a peer is lost or refuses */
  GRADWIRE_TIMEOUT = 6,
  GRADWIRE_INTERNAL = 7
} gradwire_status;

/* Element types. The numbers stay. */
typedef enum {
  GRADWIRE_FLOAT32 = 1,
  GRADWIRE_FLOAT16 = 2,
  GRADWIRE_BFLOAT16 = 3,
  GRADWIRE_FLOAT64 = 4,
  GRADWIRE_INT8 = 5,
  GRADWIRE_UINT8 = 6,
  GRADWIRE_INT32 = 7,
  GRADWIRE_INT64 = 8
} gradwire_dtype;

/* What becomes of the workers' contributions. */
typedef enum { GRADWIRE_AVERAGE = 1, GRADWIRE_SUM = 2 } gradwire_op;

typedef struct gradwire_client gradwire_client;

/* A tensor before its first use. All workers say the same. */
typedef struct {
  const char* name;      /* 1 to 1024 bytes, unique in the job */
  const uint64_t* shape; /* num_dimensions extents; none: a scalar */
  uint32_t num_dimensions;
  int32_t dtype;    /* a gradwire_dtype */
  int32_t op;       /* a gradwire_op */
  int32_t priority; /* higher goes first */
} gradwire_tensor;

/* One push-pull under way. */
typedef struct {
  uint32_t tensor;
  uint64_t generation;
} gradwire_handle;

/* Elements [offset, offset + count) of a tensor. */
typedef struct {
  uint64_t offset;
  uint64_t count;
} gradwire_range;

/* Since the connection was made. Bytes on the wire are frames with the transport's framing. */
typedef struct {
  uint64_t sent_bytes;
  uint64_t received_bytes;
  uint64_t raw_push_bytes; /* gradients at their own dtype */
  uint64_t raw_pull_bytes;
  uint64_t nonfinite_units; /* rounds that gave NaN to every rank */
  uint64_t resent_pushes;
  uint64_t reconnects;
} gradwire_stats;

/* GRADWIRE_ABI_VERSION of the library. A caller checks it before anything else. */
uint32_t gradwire_abi_version(void);
/* As "0.1.0". Valid for ever. */
const char* gradwire_version(void);

/* What was wrong in this thread's last call that failed; "" if none has. Valid until this thread's
   next call. */
const char* gradwire_last_error(void);

/* Connects and waits until every process of the job is there.
   config_path: the YAML file; NULL: the variable GRADWIRE_CONFIG, else defaults and environment.
   assignments: num_assignments texts "key=value" over file and environment.
   rank: this worker's number; negative: from the environment.
   *client is set to NULL if it fails.
   Errors: INVALID_ARGUMENT for what is wrong in the configuration or differs between processes,
   TIMEOUT after timeouts.start (who is missing), UNAVAILABLE. */
gradwire_status gradwire_init(const char* config_path, const char* const* assignments,
                              size_t num_assignments, int64_t rank, gradwire_client** client);

/* Says goodbye and waits until every server has acknowledged it; later calls fail.
   Errors: as gradwire_wait. */
gradwire_status gradwire_close(gradwire_client* client);
/* Closes if that has not been done, and frees. With push-pulls still in flight it gives them up,
   and the job ends with an error that says so. NULL is allowed. In a forked process it does
   nothing. Threads: no other call may be under way. */
void gradwire_free(gradwire_client* client);

/* These four never change and also answer in a forked process; for NULL they are 0. */
uint32_t gradwire_rank(const gradwire_client* client);
uint32_t gradwire_size(const gradwire_client* client); /* number of workers */
/* Number of this worker on its host, as the launcher told; 0 if nobody did. */
uint32_t gradwire_local_rank(const gradwire_client* client);
/* Workers on this host; 1 if nobody told. */
uint32_t gradwire_local_size(const gradwire_client* client);

/* Declares num_tensors tensors together (small ones travel fused) and writes their ids.
   Errors: INVALID_ARGUMENT on every worker, naming tensor, ranks and both values, if they differ;
   TIMEOUT after timeouts.stall_stop. */
gradwire_status gradwire_declare(gradwire_client* client, const gradwire_tensor* tensors,
                                 size_t num_tensors, uint32_t* ids);

/* Begins to push `input` and to pull the average (or sum) into `output`, `bytes` bytes each,
   aligned to their elements. `input` stays valid and unchanged, `output` valid and untouched, until
   the handle has completed, also with an error. They may be the same array.
   Errors: INVALID_ARGUMENT for a wrong size, an unknown id, a tensor already in flight, a learning
   rate that is missing (`ef_lr`), or one that differs from that of a tensor it is fused with; and
   where the job has a method and no gradwire_optimizer was made. */
gradwire_status gradwire_push_pull(gradwire_client* client, uint32_t tensor, const void* input,
                                   void* output, size_t bytes, gradwire_handle* handle);

/* 1 once gradwire_wait would return at once (also with an error), else 0. */
int gradwire_poll(gradwire_client* client, gradwire_handle handle);

/* Blocks until the push-pull has completed, at most timeout_ms; negative: until the job's own
   deadline (timeouts.stall_stop), which ends the job.
   A round that was not finite completes with NaN in every element on every rank; see
   gradwire_was_nonfinite.
   Errors: TIMEOUT naming the tensor and what it waits for (the job goes on and the handle stays
   valid if timeout_ms was the shorter one); the error that ended the job. */
gradwire_status gradwire_wait(gradwire_client* client, gradwire_handle handle, int64_t timeout_ms);

/* Of a push-pull that has completed, until its tensor is pushed again: 1 if its result is NaN
   because a contribution or the sum was not finite, else 0. Large tensors travel in several parts,
   of which some may be finite; small ones that travel together share this. 0 for every other
   handle. */
int gradwire_was_nonfinite(const gradwire_client* client, gradwire_handle handle);
/* How many ranks' contributions were not finite in such a push-pull, and the first `room` of these
   ranks, in order, in `ranks` (NULL counts as no room). With gradwire_was_nonfinite 1 and no ranks
   every contribution was finite, but their sum was not. */
size_t gradwire_nonfinite_ranks(const gradwire_client* client, gradwire_handle handle,
                                uint32_t* ranks, size_t room);

/* The learning rate of these tensors' gradients, for push-pulls that begin afterwards; the same on
   every rank. With feedback `ef_lr` it is to be given before a tensor's first push: what was not
   sent is weighed with the rate of then over that of now. Elsewhere it changes nothing. `tensors`
   may be NULL if num_tensors is 0.
   Errors: INVALID_ARGUMENT for an unknown id (nothing is changed then), or a rate that is negative
   or not finite. */
gradwire_status gradwire_set_learning_rate(gradwire_client* client, const uint32_t* tensors,
                                           size_t num_tensors, double rate);
/* What the loss, and with it every gradient, is multiplied with, for push-pulls that begin
   afterwards; the same on every rank. Residuals follow it, so that results can be divided by it.
   0: not given, as at first; residuals stay as they are.
   Errors: INVALID_ARGUMENT for a scale that is negative or not finite. */
gradwire_status gradwire_set_loss_scale(gradwire_client* client, double scale);

/* Ends the step: what is fused and still lacks members goes out with zeros for those. */
gradwire_status gradwire_end_step(gradwire_client* client);

/* Copies worker `root`'s `data` to all, byte for byte, whatever the compression.
   Errors: INVALID_ARGUMENT if sizes or roots differ. */
gradwire_status gradwire_broadcast(gradwire_client* client, const char* name, void* data,
                                   size_t bytes, uint32_t root);

/* Blocks until every worker has called it. */
gradwire_status gradwire_barrier(gradwire_client* client);

/* Writes to `buffer` of *bytes bytes what this worker must keep so that the job can go on after a
   restart of all its processes, and sets *bytes to its size: the worker's residuals, the step and
   the rounds; with rank 0 also the residuals of all servers. Collective, at the same step on every
   rank and while nothing is in flight on any; every rank keeps its own bytes. `buffer` may be NULL
   if *bytes is 0. Errors: BUFFER_TOO_SMALL with *bytes set; call again with that much. The second
   call is not collective: it hands out what the first has gathered, unless a push-pull,
   gradwire_end_step or gradwire_load_state came between. INVALID_ARGUMENT while something is in
   flight. */
gradwire_status gradwire_save_state(gradwire_client* client, void* buffer, size_t* bytes);
/* Takes what gradwire_save_state wrote on the same rank of a job with as many workers. Collective,
   while nothing is in flight, before or after tensors are declared. Residuals belong to tensors:
   with another compressor, or cut or fused otherwise, whatever has feedback takes them over; what
   nobody uses is named in the log at the next gradwire_end_step.
   Errors: INVALID_ARGUMENT on every worker if the state is of another number of workers; the job
   goes on, and without a state residuals begin at zero. What may be wrong on one worker alone ends
   the job, since the others wait: CORRUPT_DATA if it is not what gradwire_save_state wrote,
   INVALID_ARGUMENT if it is another rank's or of another step than the others'. */
gradwire_status gradwire_load_state(gradwire_client* client, const void* buffer, size_t bytes);

/* Writes the plan as JSON to `text` of *bytes bytes, without a zero behind it, and sets *bytes to
   its size: what is sent together and how it is compressed (docs/python.md has the fields). Errors:
   BUFFER_TOO_SMALL with *bytes set. */
gradwire_status gradwire_plan(gradwire_client* client, char* text, size_t* bytes);

gradwire_status gradwire_get_stats(const gradwire_client* client, gradwire_stats* stats);

/* One number by name, for what has come since gradwire_stats was fixed. Since the first step that
   compressed something, all 0 without one: "compression_saves_ms" and "compression_costs_ms", each
   a step; since the connection was made: "goodput", payload bytes a second (0 until it is known).
   Means of the last 16 steps, 0 before the second gradwire_end_step: "step_ms", a step's time;
   "comm_ms", its bytes over the goodput; "compute_ms", the time of the caller's in which they can
   be on their way; "ccr", comm_ms over compute_ms; "exposed_ms", how long the caller was blocked.
   docs/operations.md has the definitions.
   Of the filter: "interval", in how many steps a unit is sent once (0 without a filter, 1: in each
   one; it changes in mid-run if `interval` is `auto`); since the connection was made:
   "held_back_units", how often a unit was, and "held_back_nonfinite", elements that were not finite
   and so left out; once tensors are declared, "filter_skips", 1 if the output of what is held back
   is left alone (`inactive: skip`). Errors: NOT_FOUND with the names there are. */
gradwire_status gradwire_get_value(const gradwire_client* client, const char* name, double* value);

/* The exit code that fits an error that has ended the job (docs/operations.md): 2 configuration, 3
   not started in time, 4 stalled, 5 peer lost, else 1. started: 0 if gradwire_init gave it. */
int gradwire_exit_code(int status, int started);

/* ---- The filter (compression.filter, docs/covap.md) ---- */

/* Of a tensor's last push-pull, complete or not: how many stretches of it are sent in that step,
   into *count, and the first `room` of them, in order, into `ranges` (NULL counts as no room). What
   is not in them is held back: its output is zeros, or with `inactive: skip` what it was before.
   Without a filter it is the whole tensor in one stretch.
   Errors: INVALID_ARGUMENT if the handle is not of the tensor's last push-pull. */
gradwire_status gradwire_active_ranges(const gradwire_client* client, gradwire_handle handle,
                                       gradwire_range* ranges, size_t room, size_t* count);

/* ---- Adaptive methods (the setting `method`, docs/methods.md) ---- */

/* A method with its state of every tensor, on one worker. It is freed before its client.
   Threads: send and update from several threads for different tensors; everything else alone. */
typedef struct gradwire_optimizer gradwire_optimizer;

/* method: "lans(beta1=0.95)", the same on every worker; NULL: what the job's setting `method` says.
   Where the setting is not none, it is that one. *optimizer is set to NULL if it fails.
   Errors: NOT_FOUND for an unknown method; INVALID_ARGUMENT for a parameter, for one that does not
   go with the job's compression, warm-up or filter, for another than the setting, and for NULL
   where the setting is none. */
gradwire_status gradwire_optimizer_create(gradwire_client* client, const char* method,
                                          gradwire_optimizer** optimizer);
/* NULL is allowed. In a forked process it does nothing. */
void gradwire_optimizer_free(gradwire_optimizer* optimizer);

/* The method with all its parameters, as "sgd(momentum=0.9,weight_decay=0)". Valid until it is
   freed; NULL for NULL. */
const char* gradwire_optimizer_method(const gradwire_optimizer* optimizer);

/* A declared tensor, float32 and averaged, before its first send. name: under which its state is
   saved; NULL: the name it was declared with. decays: 1 if weight decay applies to it, else 0
   (biases, norms).
   Errors: INVALID_ARGUMENT for another tensor, or one or a name that is there already. */
gradwire_status gradwire_optimizer_add(gradwire_optimizer* optimizer, uint32_t tensor,
                                       const char* name, int decays);

/* Turns this worker's gradient, `count` elements, into what it pushes, in place.
   Errors: INVALID_ARGUMENT for a tensor that was not added, another count, a tensor that was sent
   and not updated, one that had no update in the warm-up of a method that has one, or a method that
   is in its warm-up when the job's is over: its own state was not loaded with the job's. */
gradwire_status gradwire_optimizer_send(gradwire_optimizer* optimizer, uint32_t tensor,
                                        float* gradient, size_t count);
/* Brings `pulled`, the output of the tensor's last push-pull, which has completed, into
   `parameters`, `count` elements each. What the filter held back of them is left alone. It comes
   before the tensor's next send, also after gradwire_optimizer_end_step. If `pulled` is not finite,
   parameters and state stay as they are, on every worker alike, and it is counted ("skipped").
   Errors: INVALID_ARGUMENT, also for a tensor that was not sent or is under way, or a rate that is
   negative or not finite. */
gradwire_status gradwire_optimizer_update(gradwire_optimizer* optimizer, gradwire_handle handle,
                                          const float* pulled, double rate, float* parameters,
                                          size_t count);
/* Takes back a send whose update is not wanted; nothing if there was none. */
gradwire_status gradwire_optimizer_cancel(gradwire_optimizer* optimizer, uint32_t tensor);
/* Once a step, when everything was sent, beside gradwire_end_step: the method's warm-up counts
   these calls. */
gradwire_status gradwire_optimizer_end_step(gradwire_optimizer* optimizer);

/* Writes the state of all tensors to `buffer` of *bytes bytes and sets *bytes to its size. Each
   worker keeps its own, beside parameters and gradwire_save_state. `buffer` may be NULL if *bytes
   is 0. Errors: BUFFER_TOO_SMALL with *bytes set; INVALID_ARGUMENT for a tensor that was sent and
   not updated. */
gradwire_status gradwire_optimizer_save(const gradwire_optimizer* optimizer, void* buffer,
                                        size_t* bytes);
/* Takes what gradwire_optimizer_save wrote; the same tensors have been added, in any order. It goes
   on bit for bit. Errors, with nothing changed: CORRUPT_DATA for damaged bytes; INVALID_ARGUMENT
   for another method or tensors that differ. */
gradwire_status gradwire_optimizer_load(gradwire_optimizer* optimizer, const void* buffer,
                                        size_t bytes);

/* One number by name: "step"; "updates" and "skipped", of all tensors, since the beginning;
   "weight_decay"; "freeze_step", the first step after the warm-up, 0 without one; "needs_skip", 1
   if a tensor that nobody has a gradient of is to be left out instead of updated with zeros.
   Errors: NOT_FOUND with the names there are. */
gradwire_status gradwire_optimizer_get_value(const gradwire_optimizer* optimizer, const char* name,
                                             double* value);

#ifdef __cplusplus
}
#endif
