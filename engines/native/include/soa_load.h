/* soa_load: open a bundle's folder, as `pipeline pull` or `pipeline run` leaves it, without Python.
 *
 * Every file of the folder is read once and must have the digest that SHA256SUMS lists; a missing, altered or
 * extra one, a link or a special file is refused. In production the folder must carry the note of its own promotion
 * (PROMOTED.json) and, where anybody asks, the signature of a trusted key. Then the artifact for this host is
 * opened: its files must still be those that were hashed.
 */
#ifndef SOA_LOAD_H
#define SOA_LOAD_H

#include "soa_runner.h"

#ifdef __cplusplus
extern "C" {
#endif

enum soa_load_code { /* beside soa_code */
  SOA_BAD_BUNDLE = 16,    /* the folder is not the sealed bundle: damaged, altered, or of a later format */
  SOA_NOT_PROMOTED = 17,  /* no promotion vouches for it: production does not run it */
  SOA_NOT_SIGNED = 18,    /* no trusted key has signed it, or a key cannot be read */
  SOA_WRONG_HOST = 19,    /* it has no artifact that this host can run from C++ */
  SOA_WRONG_VERSION = 20, /* another bundle than the one that was asked for */
  SOA_DEVIATES = 21       /* test mode: an answer is not the reference's */
};

/* What is asked for; zero everything that is not set. */
typedef struct soa_loading {
  int32_t test;        /* 1: any folder, promoted or not; it is run on the bundle's own reference before it is given */
  int32_t threads;     /* that one run may use, and that share the tiles; 0: as the version's config says */
  int32_t instances;   /* runs at one moment; 0: as the version's config says, else one a core */
  const char *device;  /* null: "cpu". On a GPU name the target too */
  const char *target;  /* null: the highest CPU level of this host that the version is verified on */
  const char *engine;  /* null: the one that was chosen, or the fastest valid one that C++ can run */
  const char *digest;  /* null: of any bundle */
  /* Files or folders of public keys and root certificates, with ':' in between, of which one must have signed; null:
   * none is asked for. What PIPELINE_TRUSTED_KEYS names is asked for besides. In production alone. */
  const char *trusted_keys;
} soa_loading;

/* What was opened. */
typedef struct soa_origin {
  const char *name;      /* the model's */
  const char *ref;       /* the version of which the folder is a copy, "jets/3"; "" if it does not say */
  const char *digest;    /* the bundle's: 64 hexadecimal digits */
  const char *target, *engine;
  const char *folder;    /* of the artifact */
  const char *arguments; /* the content of its arguments.txt: soa/describe.py has the format */
  int32_t threads;
} soa_origin;

/* loading may be null: production on the CPU. On success both are the caller's: soa_model_close, soa_origin_delete. */
int soa_load(const char *folder, const soa_loading *loading, soa_model **model, soa_origin **origin, char *message,
             size_t message_size);

/* Null is allowed. */
void soa_origin_delete(soa_origin *origin);

#ifdef __cplusplus
}
#endif
#endif
