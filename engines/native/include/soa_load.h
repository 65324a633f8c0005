/* soa_load: open a bundle's folder, as `pipeline pull` or `pipeline run` leaves it, without Python.
 *
 * Every file of the folder is read once and must have the digest that SHA256SUMS lists. A missing, altered or
 * extra file, a link or a special file is an error. In production the folder must contain the record of its promotion
 * (PROMOTED.json) and, if keys are given, the signature of a trusted key. Then the artifact for this host is opened.
 * Its files must not have changed after they were hashed.
 */
#ifndef SOA_LOAD_H
#define SOA_LOAD_H

#include "soa_runner.h"

#ifdef __cplusplus
extern "C" {
#endif

enum soa_load_code { /* besides those of soa_code */
  SOA_BAD_BUNDLE = 16,    /* the folder is not the sealed bundle: damaged, altered, or of a later format */
  SOA_NOT_PROMOTED = 17,  /* the bundle was not promoted, and production does not run it */
  SOA_NOT_SIGNED = 18,    /* no trusted key has signed it, or a key cannot be read */
  SOA_WRONG_HOST = 19,    /* it has no artifact that this host can run from C++ */
  SOA_WRONG_VERSION = 20, /* not the bundle that was asked for */
  SOA_DEVIATES = 21       /* test mode: an answer differs from the reference */
};

/* The options. Set every field that you do not use to zero. */
typedef struct soa_loading {
  int32_t test;        /* 1: any folder, promoted or not; the model is first run on the bundle's reference */
  int32_t threads;     /* how many threads one run may use, also for tiles; 0: as in the version's config */
  int32_t instances;   /* how many runs at the same time; 0: as in the version's config, else one for each core */
  const char *device;  /* null: "cpu". For a GPU, `target` is needed, too */
  const char *target;  /* null: the highest CPU level of this host that the version is verified on */
  const char *engine;  /* null: the one that was chosen, or the fastest valid one that C++ can run */
  const char *digest;  /* the digest that the bundle must have; null: any */
  /* Files or folders of public keys and root certificates, separated by ':'. One of them must have signed the bundle; null:
   * no signature is needed. A key in PIPELINE_TRUSTED_KEYS must have signed, too. Used in production only. */
  const char *trusted_keys;
} soa_loading;

/* A description of the opened artifact. */
typedef struct soa_origin {
  const char *name;      /* the name of the model */
  const char *ref;       /* the version of which the folder is a copy, such as "jets/3"; "" if unknown */
  const char *digest;    /* of the bundle: 64 hexadecimal digits */
  const char *target, *engine;
  const char *folder;    /* of the artifact */
  const char *arguments; /* the content of its arguments.txt: soa/signature_lines.py has the format */
  int32_t threads;
  const char *columns;   /* how the columns of the reference are distributed (reports/columns.json); "" if unknown */
} soa_origin;

/* loading: null means production on the CPU. On success the caller owns *model (free it by soa_model_close) and *origin
 * (by soa_origin_delete). */
int soa_load(const char *folder, const soa_loading *loading, soa_model **model, soa_origin **origin, char *message,
             size_t message_size);

/* `origin` may be null. */
void soa_origin_delete(soa_origin *origin);

/* Counts the values of a share of the calls, for `pipeline drift` (docs/howto/drift.md). Any number of threads may use it. */
typedef struct soa_watch soa_watch;

/* n values of one column on the CPU. key: "collection/column", or "collection/column[k]" for component k of several. */
typedef struct soa_values {
  const char *key;
  const char *dtype; /* values of 16-bit floats are not counted */
  const void *data;
  int64_t n;
} soa_values;

/* *watch is null if the environment variable PIPELINE_WATCH does not ask for a share, or the version has no `columns`. The
 * counts go to a new file in the folder PIPELINE_COUNTS, which is written every ten seconds and at the end. */
int soa_watch_open(const soa_origin *origin, soa_watch **watch, char *message, size_t message_size);

/* 1 if this call is to be counted, which is drawn at random. */
int soa_watch_draws(const soa_watch *watch);

/* Count a call. Columns that the version does not know are left out. */
void soa_watch_count(soa_watch *watch, const soa_values *values, size_t count);

/* Write the counts, and delete it. `watch` may be null. */
void soa_watch_close(soa_watch *watch);

#ifdef __cplusplus
}
#endif
#endif
