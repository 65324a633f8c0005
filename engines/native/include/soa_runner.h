/* soa_runner: runs an artifact (a library or a kernel) on the caller's memory, from any thread.
 *
 * A C interface without Python and without torch's headers. The torch functions that it needs belong to
 * torch's stable C shim and are found when a library is opened, so one build works with every torch version.
 *
 * A call object holds the arguments of the calling convention as tensor handles over the caller's
 * memory. It does not own that memory: keep it alive until the call is deleted. A run copies nothing
 * and writes the outputs in place.
 *
 * After a fork the child may run, open and close models as its parent does. It gets SOA_FORKED from a
 * model on a GPU, from a model that another thread was running at the fork, and, in the thread that
 * forked, from a model with several threads, because OpenMP would wait for workers that do not exist.
 *
 * Every function that can fail returns a code and, if it is not SOA_OK, a message in the caller's
 * buffer; soa_refusal then gives a more precise code. No exception leaves these functions.
 */
#ifndef SOA_RUNNER_H
#define SOA_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SOA_RUNNER_ABI 1

enum soa_code {
  SOA_OK = 0,
  SOA_BAD_ARGUMENT = 1, /* a null pointer, an unknown dtype, an impossible size */
  SOA_OPEN_FAILED = 2,  /* the library cannot be loaded, is not that of an artifact, or was built
                           for a CPU or device that is not here */
  SOA_RUN_FAILED = 3,   /* the artifact reported an error; torch printed it to stderr */
  SOA_BUSY = 4,         /* another thread is running this call */
  SOA_CLOSED = 5,       /* the model was closed */
  SOA_FORKED = 6        /* it cannot run in this child of a fork, see above */
};

typedef struct soa_model soa_model;
typedef struct soa_call soa_call;

/* One dense argument. sizes: [n, 0] for a row carrier, [F, S] for a matrix, [n] for a column, [1]
 * for a scalar. data may be null only if the tensor has no elements. */
typedef struct soa_tensor {
  void *data;
  const char *dtype; /* "bool", "int8" ... "int64", "uint8" ... "uint32", "float16", "bfloat16",
                        "float32", "float64" */
  int32_t ndim;      /* 1 or 2 */
  int64_t sizes[2];
} soa_tensor;

/* The code of this thread's last error, such as "bind-rows"; "" if there was none.
 * docs/reference/refusals.md explains the codes. The pointer is never null and stays valid. */
const char *soa_refusal(void);

/* Open the library of an unpacked artifact. device: "cpu", "cuda" or "cuda:1".
 * folder: the artifact's folder, with its GPU kernels; may be null if it has none of these files:
 * - weights.bin, described by weights.txt: the weights are mapped from there, read-only, so that
 *   processes share their pages. A library named *.bare.so needs them.
 * - target.txt: the library is not loaded if this CPU lacks features of that level.
 * instances: how many threads can run at the same time; others wait. The weights are held only once.
 * With 0, one thread runs at a time, and a run may be recorded into a CUDA graph (AOTInductor's usual
 * run queries events, which is not possible in a graph).
 * threads: how many threads may compute one run. An artifact of `lanes` shares the rows between them, if each
 * has enough to do; the bits do not depend on it. For torch's kernels it is the number of OpenMP threads: with 1
 * every calling thread gets the same bits; with 0 each keeps its own setting, which is restored afterwards. */
int soa_model_open(const char *library, const char *device, const char *folder,
                   int32_t instances, int32_t threads, soa_model **model, char *message,
                   size_t message_size);

/* Wait for running calls to end, and close the model; later calls get SOA_CLOSED. `model` may be null. */
void soa_model_close(soa_model *model);

/* The number of arguments of the artifact. */
size_t soa_model_arguments(const soa_model *model);

/* Tie arguments, in the order of the signature, to memory. */
int soa_call_create(soa_model *model, const soa_tensor *arguments, size_t count, soa_call **call,
                    char *message, size_t message_size);

/* Replace one argument: another n, or another address of the same layout. */
int soa_call_set(soa_call *call, size_t index, const soa_tensor *argument, char *message,
                 size_t message_size);

/* Replace several arguments. On an error none is replaced. */
int soa_call_update(soa_call *call, const size_t *indices, const soa_tensor *arguments, size_t count,
                    char *message, size_t message_size);

/* From now on, runs of this call with at least 2 * rows rows process `rows` rows (a tile) at a time.
 * rows = 0: all rows at once, which is the default. The artifact must be on a CPU, and its rows must be
 * independent. kinds: a letter for each argument: n for a row carrier, c for a column, m for a matrix,
 * - for an argument that is the same for all rows. threads: how many threads, including the caller's,
 * share the tiles; the bits of the answers do not depend on it. */
int soa_call_tile(soa_call *call, const char *kinds, int64_t rows, int32_t threads, char *message,
                  size_t message_size);

/* Run once. stream: the raw stream handle on a GPU, else null; nothing is synchronised. */
int soa_call_run(soa_call *call, void *stream, char *message, size_t message_size);

/* Run calls on `threads` threads, including the caller's. The calls must not share output memory; they
 * may belong to different models. On failure `failed` is the index of the first call that failed. */
int soa_run_many(soa_call *const *calls, size_t count, int32_t threads, void *stream,
                 size_t *failed, char *message, size_t message_size);

/* `call` may be null. The memory of the arguments still belongs to the caller. */
void soa_call_delete(soa_call *call);

#ifdef __cplusplus
}
#endif
#endif
