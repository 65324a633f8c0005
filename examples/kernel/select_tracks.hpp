// A kernel that selects tracks with two networks. Nothing but the passing tracks is written to memory.
// With alpaka, define SOA_FN as ALPAKA_FN_ACC before you include this file.
#ifndef SELECT_TRACKS_HPP
#define SELECT_TRACKS_HPP

#include <cmath>
#include <cstdint>

#include "purity.h"
#include "vertex.h"

// Columns of n tracks, in the order of the file.
struct Tracks {
  std::int64_t n;
  const float *pt, *eta, *phi, *dxy, *dz, *pt_error, *dxy_error, *dz_error;
  const float *chi2, *ndof, *hits, *pixel_hits, *lost_hits;
};

struct Cuts {
  float pt, purity, vertex;
};

// Columns of the tracks that pass, in any order, and their number. There is room for all tracks.
struct Selected {
  std::uint32_t *count;
  std::int32_t *index;
  float *purity, *vertex;
};

SOA_FN inline bool preselected(float pt, float eta, const Cuts &cuts) { return pt > cuts.pt && fabsf(eta) < 2.5f; }

SOA_FN inline float significance(float value, float error) { return fabsf(value) / error; }

SOA_FN inline void write(const Selected &out, std::uint32_t at, std::int64_t i, float purity, float vertex) {
  out.index[at] = static_cast<std::int32_t>(i);
  out.purity[at] = purity;
  out.vertex[at] = vertex;
}

struct SelectTracks {
  template <class Acc>
  SOA_FN void operator()(const Acc &acc, const Tracks &tracks, const Cuts &cuts, const Selected &out) const {
    for (const auto i : uniformElements(acc, tracks.n)) {
      const float pt = tracks.pt[i], eta = tracks.eta[i];
      if (!preselected(pt, eta, cuts)) continue;
      const float dxy = tracks.dxy[i], dz = tracks.dz[i];
      const float of_pt = significance(pt, tracks.pt_error[i]), of_dxy = significance(dxy, tracks.dxy_error[i]);
      const float purity_score =
          purity::row(pt, eta, tracks.phi[i], dxy, dz, tracks.pt_error[i], tracks.dxy_error[i], tracks.dz_error[i],
                      tracks.chi2[i], tracks.ndof[i], tracks.hits[i], tracks.pixel_hits[i], tracks.lost_hits[i], of_pt,
                      of_dxy);
      const float vertex_score = vertex::row(pt, eta, dxy, dz, of_pt, of_dxy);
      if (!(purity_score > cuts.purity && vertex_score > cuts.vertex)) continue;
      write(out, atomicAdd(acc, out.count, std::uint32_t{1}), i, purity_score, vertex_score);
    }
  }
};

#endif
