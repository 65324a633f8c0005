// partial_sort, nth_element and sort with the algorithms of GNU's standard library (originally from HP and SGI). The C++
// standard does not define the order of equal elements. These functions give the same order as torch; another library, such
// as libc++, gives a different one.
#ifndef SOA_SHIM_ORDER_H
#define SOA_SHIM_ORDER_H

#include <algorithm>
#include <cstdint>

namespace soa_shim {

template <typename T, typename Compare>
class Order {
 public:
  explicit Order(Compare before) : before_(before) {}

  // Puts the first elements in order from `first` to `middle`; the order of the others is not defined.
  void partial_sort(T *first, T *middle, T *last) const {
    heap_select(first, middle, last);
    while (middle - first > 1) {
      --middle;
      pop_heap(first, middle, middle);
    }
  }

  // Puts the element at `nth` that would be there after a sort; no earlier element comes after it, no later one before it.
  void nth_element(T *first, T *nth, T *last) const {
    if (first == last || nth == last) return;
    for (int depth = depth_of(last - first); last - first > 3; --depth) {
      if (depth == 0) {
        heap_select(first, nth + 1, last);
        std::swap(*first, *nth);
        return;
      }
      T *cut = partition(first, last);
      if (cut <= nth) {
        first = cut;
      } else {
        last = cut;
      }
    }
    insertion_sort(first, last);
  }

  // Sorts: introsort down to pieces of kFew elements, then insertion. Equal elements do not keep their order.
  void sort(T *first, T *last) const {
    if (first == last) return;
    quick(first, last, depth_of(last - first));
    T *sorted = last - first > kFew ? first + kFew : last;
    insertion_sort(first, sorted);
    for (; sorted < last; ++sorted) insert(sorted);
  }

 private:
  static constexpr int64_t kFew = 16;

  // The depth limit of a recursion: twice the binary logarithm. A deeper recursion has chosen bad pivots.
  static int depth_of(int64_t count) { return 2 * (63 - __builtin_clzll(static_cast<uint64_t>(count))); }

  // Quicksort that leaves pieces of at most kFew elements unsorted.
  void quick(T *first, T *last, int depth) const {
    for (; last - first > kFew; --depth) {
      if (depth == 0) return partial_sort(first, last, last);
      T *cut = partition(first, last);
      quick(cut, last, depth - 1);
      last = cut;
    }
  }

  // Divides by the median of three elements, which is first moved to the front. Returns the first element of the second
  // part. The pivot and the elements that were swapped end the inner loops.
  T *partition(T *first, T *last) const {
    median_to(first, first + 1, first + (last - first) / 2, last - 1);
    const T *pivot = first++;
    for (;; ++first) {
      while (before_(*first, *pivot)) ++first;
      do {
        --last;
      } while (before_(*pivot, *last));
      if (first >= last) return first;
      std::swap(*first, *last);
    }
  }

  // Swaps the median of three elements with the one at `place`.
  void median_to(T *place, T *a, T *b, T *c) const {
    if (!before_(*a, *b)) std::swap(a, b);
    T *median = before_(*b, *c) ? b : before_(*a, *c) ? c : a;
    std::swap(*place, *median);
  }

  void insertion_sort(T *first, T *last) const {
    for (T *each = first + 1; each < last; ++each) {
      if (before_(*each, *first)) {
        std::rotate(first, each, each + 1);
      } else {
        insert(each);
      }
    }
  }

  // Moves an element to the left, to its place. It ends at an element that does not come after it, which must exist.
  void insert(T *place) const {
    const T value = *place;
    for (; before_(value, place[-1]); --place) *place = place[-1];
    *place = value;
  }

  // Makes a heap of the first elements, from `first` to `middle`, with the last of them in order at the top.
  void heap_select(T *first, T *middle, T *last) const {
    const int64_t count = middle - first;
    for (int64_t parent = count / 2 - 1; parent >= 0; --parent) sift(first, parent, count, first[parent]);
    for (T *each = middle; each < last; ++each) {
      if (before_(*each, *first)) pop_heap(first, middle, each);
    }
  }

  // Moves the top of the heap to `to`, whose element goes into the heap.
  void pop_heap(T *first, T *last, T *to) const {
    const T value = *to;
    *to = *first;
    sift(first, 0, last - first, value);
  }

  // Moves the hole down to a leaf, along the later one of two children, and then up to the place of the value.
  void sift(T *heap, int64_t hole, int64_t count, T value) const {
    const int64_t top = hole;
    int64_t child = 2 * hole + 2;
    for (; child < count; child = 2 * hole + 2) {
      if (before_(heap[child], heap[child - 1])) --child;
      heap[hole] = heap[child];
      hole = child;
    }
    if (child == count) {  // one child only
      heap[hole] = heap[child - 1];
      hole = child - 1;
    }
    for (int64_t parent = (hole - 1) / 2; hole > top && before_(heap[parent], value); parent = (hole - 1) / 2) {
      heap[hole] = heap[parent];
      hole = parent;
    }
    heap[hole] = value;
  }

  Compare before_;
};

}  // namespace soa_shim

#endif
