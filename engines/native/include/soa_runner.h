/* soa_runner: run a packaged AOTInductor library on the caller's memory, from any thread.
 *
 * A flat C interface without Python and without torch's headers: the torch symbols it needs are the
 * stable C shim's, resolved when a library is opened, so one build serves every torch version.
 *
 * A call object holds the arguments of the calling convention as tensor handles over the caller's
 * memory. It borrows that memory: keep it alive until the call is deleted. Running copies nothing
 * and writes the outputs in place.
 *
 * After a fork the child may run, open and close models as its parent does. It gets SOA_FORKED from a
 * model on a GPU, from one that another thread was running at that moment, and, in the thread that
 * forked, from one of several threads: OpenMP would wait for workers that are not there.
 *
 * Every function that can fail returns a code and, if it is not SOA_OK, a message in the caller's
 * buffer; soa_refusal then says more exactly what was refused. No exception leaves these functions.
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
  SOA_BAD_ARGUMENT = 1, /* a null pointer, an unknown dtype, a size that makes no sense */
  SOA_OPEN_FAILED = 2,  /* the library cannot be loaded, is not an AOTInductor model, or was built
                           for a CPU or device that is not here */
  SOA_RUN_FAILED = 3,   /* the artifact reported an error; torch printed it to stderr */
  SOA_BUSY = 4,         /* another thread is running this very call */
  SOA_CLOSED = 5,       /* the model was closed */
  SOA_FORKED = 6        /* it cannot run in this child of a fork, see below */
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

/* The code in words of the last mistake that a function told this thread, as "bind-rows"; "" if there
 * was none. docs/reference/refusals.md explains each. Never null, and it stays valid. */
const char *soa_refusal(void);

/* Open the library of an unpacked artifact. device: "cpu", "cuda", "cuda:1". folder: the artifact's
 * folder, with its GPU kernels; if it holds weights.bin (described by weights.txt), the weights are
 * mapped from there, read-only, so that processes share their pages. A library named *.bare.so needs
 * them. If it holds target.txt, the library is not loaded where this CPU lacks what that level needs.
 * May be null otherwise. At most `instances` threads run at the same moment; more wait. The weights
 * are held once, whatever `instances` is. With 0 instances one thread runs at a time, and a run may
 * be recorded into a CUDA graph (AOTInductor's ordinary run asks events that a graph cannot answer).
 * threads: how many OpenMP threads torch's kernels may use inside one run, whichever thread it is
 * called from; with 1 every calling thread gets the same bits, with 0 each keeps its own setting. The
 * setting of the calling thread is put back. */
int soa_model_open(const char *library, const char *device, const char *folder,
                   int32_t instances, int32_t threads, soa_model **model, char *message,
                   size_t message_size);

/* Close it; calls that are running end first, later ones get SOA_CLOSED. Null is allowed. */
void soa_model_close(soa_model *model);

/* Number of arguments the artifact takes. */
size_t soa_model_arguments(const soa_model *model);

/* Tie arguments, in the order of the signature, to memory. */
int soa_call_create(soa_model *model, const soa_tensor *arguments, size_t count, soa_call **call,
                    char *message, size_t message_size);

/* Replace one argument: another n, or another address of the same layout. */
int soa_call_set(soa_call *call, size_t index, const soa_tensor *argument, char *message,
                 size_t message_size);

/* Replace several arguments: all of them or, on an error, none. */
int soa_call_update(soa_call *call, const size_t *indices, const soa_tensor *arguments, size_t count,
                    char *message, size_t message_size);

/* From now on run this call on `rows` rows at a time wherever it has twice as many; 0: on all at once,
 * as at first. The artifact's rows must not see each other, and it is on a CPU. kinds has a letter for
 * each argument: n for a row carrier, c for a column, m for a matrix, and - for what is the same for
 * all rows. With more than one thread (the caller's among them) they share the tiles; the answers are
 * the same bits. */
int soa_call_tile(soa_call *call, const char *kinds, int64_t rows, int32_t threads, char *message,
                  size_t message_size);

/* Run once. stream: the raw stream handle on a GPU, else null; nothing is synchronised. */
int soa_call_run(soa_call *call, void *stream, char *message, size_t message_size);

/* Run calls on `threads` threads, the caller's among them; they share no output memory and may be of
 * different models. On failure `failed` is the index of the first call that did not run. */
int soa_run_many(soa_call *const *calls, size_t count, int32_t threads, void *stream,
                 size_t *failed, char *message, size_t message_size);

/* Null is allowed. The memory behind the arguments is the caller's. */
void soa_call_delete(soa_call *call);

#ifdef __cplusplus
}
#endif
#endif
