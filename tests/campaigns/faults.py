"""Faults that the campaign puts into the program, each with the checks that must see it.

`old` is text that stands in one place of all product files; `new` replaces it. `seen_by` names
tests, by their functions, or the arguments of a campaign (`kill --each promote`). When the code
changes, `old` may have to follow: the campaign, and `pytest -m long -k has_its_place`, report each
text that no longer stands in exactly one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    old: str
    new: str
    seen_by: tuple[str, ...]


FAULTS = (
    # Files and their digests
    Fault(
        "one file's digest is not checked",
        "names = [name for name in listed if verify and name != main]",
        'names = [n for n in listed if verify and n != main and not n.endswith("/weights.bin")]',
        ("test_an_altered_byte_is_refused_unless_nothing_is_verified",),
    ),
    Fault(
        "the manifest's digest is not checked",
        "_require_digest(root, main, listed, hashlib.sha256(content).hexdigest(), len(content))",
        "",
        ("test_altered_manifest_is_refused_in_any_case",),
    ),
    Fault(
        "files that SHA256SUMS does not list are accepted",
        "if extra := sorted(present - listed.keys() - _BESIDE):",
        "if extra := []:",
        ("test_bundle.test_any_damage_is_refused",),
    ),
    Fault(
        "the registry's digest is not compared with the files'",
        "another = opened.digest != registered",
        "another = False",
        ("test_another_bundle_in_the_store_is_refused",),
    ),
    Fault(
        "a file that was replaced after it was hashed is not hashed again",
        "if self._bundle.hashed.get(name, now) != now:",
        "if False:",
        ("test_a_file_that_was_changed_before_cannot_be_pinned",),
    ),
    Fault(
        "a file is not checked again after an engine has opened it",
        "if identity(handle) != self._identities[name]:",
        "if False:",
        ("test_written_while_it_is_held", "test_another_process_judges_what_was_hashed"),
    ),
    Fault(
        "an archive may hold links",
        "        if not plain_file and not member.isdir():",
        "        if False:",
        ("test_an_archive_of_links_is_refused",),
    ),
    # Which code may be run
    Fault(
        "the signature of a folder is not required",
        "            require_signature(bundle, keys)\n    else:",
        "            pass\n    else:",
        ("test_a_folder_without_a_signature_is_refused",),
    ),
    Fault(
        "the signature that a policy demands is not required",
        "    groups += [\n        tuple(parse_trusted(pem, origin) for pem in keys) "
        "for origin, keys in signers.items()\n    ]\n",
        "",
        ("test_a_policy_of_the_registry",),
    ),
    Fault(
        "a target that the signature does not cover is run",
        "withheld = dict.fromkeys(passed, NOT_SIGNED) if signed else {}",
        "withheld: dict[str, str] = {}",
        ("test_targets_that_were_not_promoted_or_signed_are_withheld",),
    ),
    Fault(
        "production loads a version that was not promoted",
        "            if opening.production:\n                promotion =",
        '            if opening.production and version.promotion("production"):\n'
        "                promotion =",
        ("test_production_refuses_what_was_not",),
    ),
    Fault(
        "a promotion of another model counts",
        "    if named not in (",
        "    if record.model and named not in (named, ",
        ("test_copied_into_another_model",),
    ),
    Fault(
        "a promotion counts although the history does not contain it",
        "recorded = [promotion for promotion in history if promotion == promotion.of(self)]",
        "recorded = [tagged]",
        ("test_written_by_hand",),
    ),
    Fault(
        "the trusted keys of the host are ignored",
        "groups = [] if host is None else [host]",
        "groups: list[tuple[Trusted, ...]] = []",
        ("test_request.test_the_host",),
    ),
    Fault(
        "a version that was not promoted is deployed",
        "open_version(Opening(ref, registry=registry))",
        'open_version(Opening(ref, mode="test", registry=registry))',
        ("test_what_no_gate_let_pass",),
    ),
    Fault(
        "a server runs a version that was not promoted",
        "        session = opener(open_version(opening))",
        '        opening = Opening(opening.ref, mode="test", registry=opening.registry)\n'
        "        session = opener(open_version(opening))",
        ("test_what_was_not_promoted_runs_in_test_mode_only",),
    ),
    Fault(
        "a target that no promotion covers is run",
        "passed = [t for t, digest in version.annexes.items() "
        "if promotion.annexes.get(t) == digest]",
        "passed = list(version.annexes)",
        ("test_a_target_built_after_the_promotion_is_not_run_in_production",),
    ),
    Fault(
        "a damaged record of a lookup is used",
        'if record.get("sha256") != _digest(content):',
        "if False:",
        ("test_a_damaged_record_is_refused",),
    ),
    Fault(
        "the record of a lookup in test mode is used in production",
        'self._key = {"registry": registry, "mode": mode}',
        'self._key = {"registry": registry}',
        ("test_never_promoted",),
    ),
    Fault(
        "NaN passes the gate of tolerances",
        "passed = outside <= limit",
        "passed = not outside > limit",
        ("test_nan_passes_nothing",),
    ),
    Fault(
        "a promotion without any gate's decision is accepted",
        "passed = bool(decisions) and all(",
        "passed = all(",
        ("test_a_promotion_without_a_decision_is_refused",),
    ),
    Fault(
        "a promotion passes although the gates did not apply a policy of the registry",
        "if asked.origin not in origins",
        "if False",
        ("test_a_promotion_that_did_not_ask_it",),
    ),
    Fault(
        "the loosest of several policies counts",
        "max_outside=min((own_max_outside, *outside)),",
        "max_outside=max((own_max_outside, *outside)),",
        ("test_the_strictest_limit_of_several_policies_counts",),
    ),
    Fault(
        "an approval of another digest counts",
        'and event.digests.get(f"{event.model}/{number}") == digest',
        "",
        ("test_an_approval_is_of_one_version_and_digest",),
    ),
    Fault(
        "a promotion that is void counts for the time in staging",
        'elif since is None and event.kind == "promotion" and event.state != "void":',
        'elif since is None and event.kind == "promotion":',
        ("test_a_version_is_in_staging_since_its_promotion_there",),
    ),
    Fault(
        "any gate can be overridden",
        'NEVER_OVERRIDDEN = frozenset({"digests", "signature"})',
        "NEVER_OVERRIDDEN = frozenset[str]()",
        ("test_an_override_takes_a_gate_that_was_asked_and_a_reason",),
    ),
    Fault(
        "a version that has an alias is removed",
        "    if version.aliases:\n        aliases",
        "    if False:\n        aliases",
        ("test_a_version_with_an_alias_is_not_removed",),
    ),
    Fault(
        "an annex of another bundle is attached",
        "if record.base != bundle.digest or record.name != bundle.manifest.name:",
        "if record.name != bundle.manifest.name:",
        ("test_an_annex_of_another_bundle_is_refused",),
    ),
    # Gates, history and rollback
    Fault(
        "rollback goes to any version that @previous names",
        "                target.let_in(PRODUCTION, self.promotions(target, PRODUCTION))\n",
        "                pass\n",
        (
            "test_the_way_back_leads_where_a_gate_let_production_be",
            "test_no_rollback_to_what_production_would_refuse",
        ),
    ),
    Fault(
        "a version that came into production without the gates becomes @previous",
        "        if holder != other_than and self._was_let_in(holder):",
        "        if holder != other_than:",
        (
            "test_an_alias_that_others_moved_is_recorded_as_found",
            "test_a_promotion_over_what_no_gate_saw_leaves_no_way_back_to_it",
        ),
    ),
    Fault(
        "a promotion does not validate windows again",
        "    if candidate.windows and report.window and report.valid:\n",
        "    if False:\n",
        ("test_rows_are_judged_again_as_production_takes_them",),
    ),
    Fault(
        "a promotion does not validate tiles again",
        "            tile=candidate.tile or 0,\n",
        "            tile=0,\n",
        ("test_rows_are_judged_again_as_production_takes_them",),
    ),
    Fault(
        "only the first size counts for the gate of speed",
        "worst = max(speed.points, key=lambda point: (math.isnan(point.ratio), point.ratio))",
        "worst = speed.points[0]",
        ("test_speed_names_the_worst_point",),
    ),
    Fault(
        "one of several required approvals is enough",
        'yield Decision("approvals", not missing, approved, needed, detail)',
        'yield Decision("approvals", approved != "none", approved, needed, detail)',
        ("test_all_whom_a_policy_names_must_approve",),
    ),
    Fault(
        "an unverified target is excused although a policy names it",
        "return target in self.allow_unverified - self.needed.named_targets",
        "return target in self.allow_unverified",
        ("test_an_unverified_target_that_a_policy_names_does_not_pass",),
    ),
    Fault(
        "a promotion covers targets that its gates did not check",
        "annexes={t: digest for t, digest in current.annexes.items() if t in seen},",
        "annexes=dict(current.annexes),",
        ("test_a_promotion_remembers_what_its_gates_saw",),
    ),
    Fault(
        "a promotion drops the targets that an earlier promotion covered",
        "seen = {*annexes, *(earlier.annexes if earlier else ())}",
        "seen = {*annexes}",
        ("test_a_promotion_remembers_what_its_gates_saw",),
    ),
    Fault(
        "a promotion overwrites another one that was made while its gates measured",
        "        if replacing is None or holder == replacing:\n",
        "        if True:\n",
        ("test_a_promotion_is_refused_if_production_changed_since_its_gates_measured",),
    ),
    Fault(
        "the policy of one model is ignored; only the policy for all models counts",
        "scopes = [None] if model is None else [None, model]",
        "scopes: list[str | None] = [None]",
        ("test_a_model_has_a_policy_beside_that_for_all",),
    ),
    Fault(
        "a policy counts although the command that set it was killed",
        'scope, status="FINISHED", order="end_time DESC"',
        'scope, order="end_time DESC"',
        ("test_a_policy_whose_setting_was_killed_asks_for_nothing",),
    ),
    Fault(
        "a deleted version is read from the database's tables",
        "AND v.current_stage <> 'Deleted_Internal'",
        "",
        ("test_sqlite_gives_the_answers_of_mlflows_client",),
    ),
    Fault(
        "an event may be older than the one before it",
        "            now = max(now, after.time + timedelta(milliseconds=1))\n",
        "            pass\n",
        ("test_an_event_is_later_than_the_one_before_although_the_clock_is_behind",),
    ),
    Fault(
        "a promotion to staging counts for production",
        "            if (event.alias, event.version, event.state) "
        '== (alias, version.number, "done")\n',
        """            if event.version == version.number and event.state == "done"\n""",
        ("test_a_promotion_to_staging_is_none_to_production",),
    ),
    # The registry, with writers that are killed or write at the same time
    Fault(
        "an alias moves before its event",
        "        self.last = opened = self.history.append(event, self.last)\n        try:",
        "        if event.alias:\n            self._move_alias(event, event.alias)\n"
        "        self.last = opened = self.history.append(event, self.last)\n        try:",
        ("test_a_move_happens_or_does_not",),
    ),
    Fault(
        "the alias moves before the tag of its promotion",
        '            self._prepare(opened)\n            if opened.kind == "build":',
        '            if opened.kind == "build":',
        ("test_a_move_happens_or_does_not",),
    ),
    Fault(
        "the work of a killed writer is neither completed nor undone",
        "            writer.settle()\n",
        "",
        ("test_a_move_happens_or_does_not",),
    ),
    Fault(
        "the file lock is not taken",
        "        acquired = lock.acquire()\n    except Timeout:\n        raise RegistryUn",
        "        acquired = contextlib.nullcontext()\n"
        "    except Timeout:\n        raise RegistryUn",
        ("test_file_lock_waits_and_says_who_to_stop",),
    ),
    Fault(
        "a writer goes on writing after its lease has expired",
        "if self.until is not None and time.monotonic() > self.until:",
        "if False:",
        ("test_late_owner_writes_no_more_and_ends_no_other_lease",),
    ),
    Fault(
        "a lease is taken from a writer that is alive",
        "elif now - self._seen_since > LEASE_S:",
        "else:",
        ("test_an_owner_is_dead_when_it_was_seen_for_as_long_as_a_lease_lasts",),
    ),
    Fault(
        "a lease that ended while it was read counts as that of a dead writer",
        "owner, now = lease.tags.get(_OWNER), time.monotonic()",
        'owner, now = lease.tags.get(_OWNER, ""), time.monotonic()',
        ("test_a_lease_that_ends_while_it_is_read_ends_no_other_one",),
    ),
    Fault(
        "a version is registered although `gc` has removed its files",
        "                    upload.require_open(self, client, run, bundle)\n",
        "",
        ("test_a_registration_whose_files_were_collected_makes_no_version",),
    ),
    # Shadows, pickled sessions, and the cache of a host
    Fault(
        "a shadow compares the first output only",
        "signature.outputs:\n        name = bound.block.collection\n        n = rows",
        "signature.outputs[:1]:\n        name = bound.block.collection\n        n = rows",
        ("test_shadow.test_every_output_is_compared",),
    ),
    Fault(
        "the gate passes an output that the shadow did not compare",
        '        for output in opened.signature.outputs:\n            quantity = f"largest ',
        "        for output in [o for o in opened.signature.outputs if o.name in by_output]:\n"
        '            quantity = f"largest ',
        ("test_an_output_that_was_not_compared_does_not_pass_the_gate",),
    ),
    Fault(
        "NaN in a shadow's answers counts as no difference",
        "return math.inf if math.isnan(worst) else worst",
        "return 0.0 if math.isnan(worst) else worst",
        ("test_nan_on_one_side_is_an_infinite_difference",),
    ),
    Fault(
        "events that a shadow saw beside another version count",
        "if (other.digest, other.production_digest) == (self.digest, self.production_digest):",
        "if other.digest == self.digest:",
        ("test_another_bundle_is_left_out",),
    ),
    Fault(
        "a shadow does not pause between events",
        "rested = now + _REST * (now - start) / self._fraction",
        "rested = now",
        ("test_it_works_for_no_more_than_its_fraction_of_the_time",),
    ),
    Fault(
        "a call in which a canary fails is lost",
        "            self._run_production(rows, stream)  # raises if the fault is the caller's\n",
        "",
        ("test_a_failing_canary_loses_no_call",),
    ),
    Fault(
        "a canary gets one call too many in each round",
        "        self._least = self._whole - self._part\n",
        "        self._least = self._whole - self._part - 1\n",
        ("test_a_share_is_exact_in_every_round",),
    ),
    Fault(
        "production takes a canary that no gate let in",
        '_second_opening("share", share, session, opening, canary), canary=True)',
        '_second_opening("share", share, session, replace(opening, mode="test"), canary))',
        ("test_production_takes_only_what_gates_let_in",),
    ),
    Fault(
        "a pickled session loses its trusted keys",
        "        trusted_keys=keys,\n        target=origin.target",
        "        trusted_keys=None,\n        target=origin.target",
        ("test_the_keys_that_a_caller_trusts_travel_with_it",),
    ),
    Fault(
        "a pickled session opens the version that its alias names later",
        "ref=opened.label if by_name else opened.bundle.path,",
        "ref=opening.ref if by_name else opened.bundle.path,",
        ("test_another_process_gives_the_same_bits_of_the_same_version",),
    ),
    Fault(
        "a pickled session opens another bundle without an error",
        "        if opened.bundle.digest != self.digest:\n            raise LoadError(",
        "        if False:\n            raise LoadError(",
        ("test_a_version_that_is_not_what_it_was_is_refused",),
    ),
    Fault(
        "a pickled session does not keep its target",
        "        target=origin.target if origin else None,\n    )",
        "    )",
        ("test_a_pickled_session_keeps_its_target",),
    ),
    Fault(
        "a damaged copy in the cache is used",
        "            opened = _open_registered(kind, version, target, entry.path, verify)\n"
        "        except BundleError as error:",
        "            opened = _open_registered(kind, version, target, entry.path, False)\n"
        "        except BundleError as error:",
        ("test_host_cache.test_a_flipped_bit",),
    ),
    Fault(
        "an entry of the cache is removed while it is in use",
        "            if not unused:\n                return False\n",
        "",
        ("test_eviction_spares_what_is_used",),
    ),
    Fault(
        "the record of a lookup never expires",
        "0 <= age < self.opening.max_age_s",
        "0 <= age",
        ("test_what_was_found_lately_is_not_asked_again",),
    ),
    Fault(
        "the record of a lookup is kept although the registry has refused the version",
        "            if lookup.asked:\n                self._record.forget(str(self.ref))\n",
        "",
        ("test_withdrawn",),
    ),
    Fault(
        "an older answer of the registry replaces a newer one",
        "            if recorded is not None and recorded.at > lookup.at:\n"
        "                return\n",
        "",
        ("test_an_older_answer_replaces_no_newer_one",),
    ),
    Fault(
        "a live session switches to a version with another signature",
        "                self._require_fits(opened, coming)\n",
        "                pass\n",
        ("test_live.test_another_signature",),
    ),
    # Child processes, and changes that the stage cache must notice
    Fault(
        "a child process takes our code from the working folder",
        'return [sys.executable, "-P", "-m", module, *arguments]',
        'return [sys.executable, "-m", module, *arguments]',
        ("test_nothing_comes_from_the_working_folder_but_a_model",),
    ),
    Fault(
        "a child process looks into the working folder first",
        "        entries.sort(key=lambda entry: entry == str(here))\n",
        "        pass\n",
        ("test_nothing_comes_from_the_working_folder_but_a_model",),
    ),
    Fault(
        "a change in a file that the model imports is not noticed",
        "depends_on(folder, loaded_sources())",
        "loaded_sources()",
        ("test_what_the_model_imported_counts_and_no_other_file",),
    ),
    Fault(
        "an engine that is not applicable is reported as failed",
        "    if outcome.not_applicable:\n        return",
        "    if False:\n        return",
        ("test_an_engine_that_is_not_for_a_model_is_called_one_thing_everywhere",),
    ),
    # Validation
    Fault(
        "n = 0 is not validated",
        "per_dim[dim] = sorted(n for n in sizes if rows.min <= n <= rows.proven)",
        "per_dim[dim] = sorted(n for n in sizes if max(1, rows.min) <= n <= rows.proven)",
        ("test_sizes_of_several_dimensions_run_side_by_side",),
    ),
    Fault(
        "sizes around the alignment are not validated",
        "sizes |= {line - 1, line, line + 1}",
        "pass",
        ("test_sizes_surround_every_alignment",),
    ),
    Fault(
        "memory in validation does not end at a protected page",
        'if guard and torch.device(device).type == "cpu":',
        "if False:",
        ("test_a_read_past_an_end_kills_the_process_that_validates",),
    ),
    Fault(
        "only the first output is compared",
        "        for output, deviation in case.outputs.items():\n            if deviation",
        "        for output, deviation in [*case.outputs.items()][:1]:\n            if deviation",
        ("test_every_output_is_judged",),
    ),
    Fault(
        "outputs are filled with the same bytes before each run",
        'other = run_poisoned(session, inputs, case, _ORDINARY, _ORDINARY, guard="front")',
        'other = run_poisoned(session, inputs, case, _ORDINARY, _NAN, guard="front")',
        ("test_each_fault_has_its_reason",),
    ),
    Fault(
        "the padding of inputs has the same bytes in each run",
        'other = run_poisoned(session, inputs, case, _ORDINARY, _ORDINARY, guard="front")\n'
        "        roomy = run_poisoned(session, inputs, case, _ORDINARY, _NAN, "
        "spare=_SPARE_ROWS)",
        'other = run_poisoned(session, inputs, case, _NAN, _ORDINARY, guard="front")\n'
        "        roomy = run_poisoned(session, inputs, case, _NAN, _NAN, "
        "spare=_SPARE_ROWS)",
        ("test_a_model_that_reads_its_padding",),
    ),
    Fault(
        "an artifact may write into the padding",
        "    return not same_bytes(expected, after.whole)",
        "    return False",
        ("test_any_other_byte_is_seen",),
    ),
    Fault(
        "an artifact may change its inputs",
        "if name not in written and not same_bytes(before[name], collection.whole)",
        "if False",
        ("test_each_fault_has_its_reason",),
    ),
    Fault(
        "tolerances are a thousand times as wide",
        '"float32": Tolerance(1e-5, 1e-4),',
        '"float32": Tolerance(1e-2, 1e-1),',
        ("test_default_tolerances_grow_with_coarser_dtypes",),
    ),
    Fault(
        "only a thousandth of a deviation is compared with the tolerance",
        "gap > tolerance.atol + tolerance.rtol",
        "gap / 1000 > tolerance.atol + tolerance.rtol",
        ("test_a_deviation_is_what_one_counts_by_hand",),
    ),
    Fault(
        "NaN agrees with anything",
        "mismatch = ~finite & ~same",
        "mismatch = ~finite & ~same & ~found64.isnan()",
        ("test_nan_and_infinity_agree_only_with_themselves",),
    ),
    Fault(
        "test mode accepts every answer",
        "if deviation.outside > allowed.max_outside:",
        "if False:",
        ("test_an_answer_that_is_off",),
    ),
    Fault(
        "a model that keeps state is captured",
        "    return [name for name in changed if name not in signature.user_inputs]\n",
        "    return []\n",
        ("test_the_refusal_names_the_line_of_the_model",),
    ),
    Fault(
        "a model that writes into its inputs writes into the user's memory",
        "return [x.clone() if i in self.plan else x for i, x in enumerate(inputs)]",
        "return list(inputs)",
        ("test_a_model_that_writes_into_its_inputs_gets_copies",),
    ),
    Fault(
        "production runs a target that is not verified",
        'if opened.production and record.status != "verified":',
        "if False:",
        ("test_production_runs_only_what_was_verified_on_the_target",),
    ),
    Fault(
        "stages use results that they kept for other weights",
        '"model": source_of(config).fingerprint(),',
        "",
        ("test_other_numbers_in_the_same_files_are_another_model",),
    ),
    # Memory given to `bind`
    Fault(
        "one column is left out when a layout is checked",
        "    if found == wanted:\n        return\n",
        "    if (found.columns[1:], found.alignment) == (wanted.columns[1:], wanted.alignment):\n"
        "        return\n",
        ("test_every_column_of_a_layout_counts",),
    ),
    Fault(
        "the dtypes of columns are not checked",
        "    if found == wanted:\n        return\n",
        "    if [c.name for c in found.columns] == [c.name for c in wanted.columns]:\n"
        "        return\n",
        ("test_a_layout_that_is_not_the_models_is_refused",),
    ),
    Fault(
        "the alignment of a layout is not checked",
        "    if found == wanted:\n        return\n",
        "    if (found.columns, found.storage) == (wanted.columns, wanted.storage):\n"
        "        return\n",
        ("test_a_layout_that_is_not_the_models_is_refused",),
    ),
    Fault(
        "the alignment of memory is not checked",
        "if span.nbytes and past:",
        "if False:",
        ("test_what_cannot_be_wrapped",),
    ),
    Fault(
        "a window may begin at any row although such windows were not validated",
        "if collection.start % step and not any_start:",
        "if False:",
        ("test_other_windows_are_bound_where_validation_has_tried_them",),
    ),
    Fault(
        "windows are not validated",
        "    refusal = _find_refusal("
        "[_run_on_windows(session, inputs, case, deviations_of)], tolerances)",
        "    refusal = None",
        ("test_an_artifact_that_wants_aligned_rows_gets_no_other",),
    ),
    Fault(
        "the number of rows may be used as a value",
        "    if call.counted and rule not in (_follow_comparison, follow_where):",
        "    if False:",
        ("test_rows_that_see_each_other_are_not_let_through",),
    ),
    Fault(
        "a softmax over the rows does not count as dependence",
        "        raise Mixed(ACROSS)\n    if len(call.shape) < call.largest_rank",
        "        pass\n    if len(call.shape) < call.largest_rank",
        ("test_rows_that_see_each_other_are_not_let_through",),
    ),
    Fault(
        "`lanes` accepts a model whose rows see each other",
        "        if why is not None and why.known:\n            raise NotApplicableError",
        "        if False:\n            raise NotApplicableError",
        ("test_a_model_whose_rows_see_each_other_is_refused",),
    ),
    Fault(
        "compiled code assumes that the bytes of a bool column are 0 or 1",
        "        read_bools_as_bytes(program)\n        hoist_linear(program)\n",
        "        hoist_linear(program)\n",
        ("test_no_compiler_is_told_that_a_column_is_bool",),
    ),
    Fault(
        "a row with wrong offsets gets an answer",
        "    return value.masked_fill(where, number)\n",
        "    return value\n",
        ("test_a_row_with_wrong_offsets_has_no_answer_of_any_type",),
    ),
    Fault(
        "wrong answers to very large integers are accepted",
        "        if _fraction_true(bad[name]) > most:",
        "        if False:",
        ("test_integers_of_any_size_have_the_models_answers",),
    ),
    Fault(
        "stress rows leave out the columns of zeros",
        "    for member in list_read_columns(signature):\n        name = member.column.name\n",
        "    for member in list_read_columns(signature):\n"
        "        name = member.column.name\n"
        "        if not pool[member.collection][name].any():\n"
        "            continue\n",
        ("test_stress_rows_refuse_what_the_file_hides",),
    ),
    Fault(
        "differences from eager torch at extreme values are not reported",
        "        if judged.differs:",
        "        if False:",
        ("test_floats_that_differ_from_eager_are_said",),
    ),
    Fault(
        "a copy that a library exports counts as its memory",
        "if flags & _IS_COPIED:",
        "if False:",
        ("test_an_exporter_of_a_copy",),
    ),
    Fault(
        "masked values are read as numbers",
        "if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):",
        "if False:",
        ("test_what_cannot_be_wrapped",),
    ),
    Fault(
        "outputs may lie in read-only memory",
        "        if collection.readonly:\n            reason",
        "        if False:\n            reason",
        ("test_read_only_memory_is_an_input_only",),
    ),
    Fault(
        "outputs may overlap other memory",
        "if start < largest_end and (name in outputs or holder in outputs):",
        "if False:",
        ("test_outputs_overlap_nothing",),
    ),
    Fault(
        "n above the compiled range is bound",
        "    _check_range(signature, rows)\n    return rows",
        "    return rows",
        ("test_binding.test_rows_outside_the_compiled_range_are_refused",),
    ),
    Fault(
        "a call may go beyond the bound memory",
        "limits[dim] = min(limits[dim], collection.capacity)",
        "pass",
        ("test_other_rows_beyond_the_memory_or_the_range_are_refused",),
    ),
    Fault(
        "two threads may use one binding",
        "self._acquire = partial(lock.acquire, False)",
        "self._acquire = partial(lock.acquire)",
        ("test_two_threads_on_one_binding_are_refused",),
    ),
    Fault(
        "C++ runs on more rows than were compiled for",
        "if (n < range.min || n > range.max) {",
        "if (n < range.min) {",
        ("test_cpp_refuses_what_does_not_fit",),
    ),
    # C++: memory given to `bind`, windows, records, loading
    Fault(
        "C++ binds outputs over other memory",
        "piece.begin < last->end && (written(piece) || written(*last))",
        "piece.begin < last->end && written(piece) && written(*last)",
        ("test_both_take_or_refuse_buffers", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "C++ checks only the last piece of memory for an overlap",
        "if (last == nullptr || piece.end > last->end) last = &piece;",
        "last = &piece;",
        ("test_both_take_or_refuse_separate_columns",),
    ),
    Fault(
        "C++ binds const memory as an output",
        "if (memory.readonly && state_->written.count(memory.collection) > 0) {",
        "if (false) {",
        ("test_both_take_or_refuse_buffers", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "C++ uses the first of two memories given for one collection",
        "if (!memory_.emplace(memory.collection, memory).second) {",
        "if (!memory_.emplace(memory.collection, memory).second && false) {",
        ("test_a_collection_given_twice_is_refused",),
    ),
    Fault(
        "C++ binds memory that is not aligned",
        "if (begin % alignment != 0) refuse(",
        "if (false) refuse(",
        ("test_both_take_or_refuse_buffers", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "C++ allocates less than the elements need",
        "__builtin_mul_overflow(count, size, &bytes)",
        "(bytes = count * size, false)",
        ("test_both_refuse_memory_of_their_own_that_cannot_be",),
    ),
    Fault(
        "a window of C++ may end behind its memory",
        "capacity >= first && n <= capacity - first) return;",
        "capacity >= first && n <= capacity) return;",
        ("test_both_take_or_refuse_buffers",),
    ),
    Fault(
        "a window of C++ begins at the first row of its memory",
        "return start + static_cast<std::size_t>(first) * column.itemsize;",
        "return start;",
        ("test_both_take_or_refuse_buffers", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "a typed window of C++ begins at the first row of its memory",
        "pointer = reinterpret_cast<T *>(at_) + first_;",
        "pointer = reinterpret_cast<T *>(at_);",
        ("test_every_kind_of_column_and_names_that_cpp_has_taken",),
    ),
    Fault(
        "a window of C++ may be resized beyond its last row",
        "std::int64_t most() const { return window ? n : capacity; }",
        "std::int64_t most() const { return capacity; }",
        ("test_both_take_or_refuse_calls", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "resize of C++ forgets a window's first row",
        "      tensors.push_back(describe(argument, rows));\n    }\n",
        "      tensors.push_back(describe(argument, rows));\n"
        "      for (const auto &[name, memory] : memory_) {\n"
        "        if (name != argument.collection) continue;\n"
        "        const Layout &layout = state_->layouts.at(name);\n"
        "        const auto skipped = layout[argument.column].itemsize * "
        "static_cast<std::size_t>(memory.first);\n"
        "        tensors.back().data = static_cast<char *>(tensors.back().data) - skipped;\n"
        "      }\n    }\n",
        ("test_both_take_or_refuse_separate_columns",),
    ),
    Fault(
        "C++ binds windows that were not validated",
        "if (memory.first % step != 0 && !state_->any_first) {",
        "if (false) {",
        ("test_a_version_that_was_not_validated_on_windows_refuses_odd_ones",),
    ),
    Fault(
        "a call of C++ may go beyond the bound memory",
        "if (rows.at(dim) <= memory.most()) continue;",
        "continue;",
        ("test_both_take_or_refuse_calls", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "in C++, rows that one call left out are left out by all later calls",
        "void operator()(void *stream = nullptr) { run(bound_, stream); }",
        "void operator()(void *stream = nullptr) { run(rows_, stream); }",
        ("test_both_take_or_refuse_calls", "test_both_take_or_refuse_separate_columns"),
    ),
    Fault(
        "an artifact's card may contradict the manifest",
        "if lines not in _possible_cards(contract, candidate):",
        "if False:",
        (
            "test_what_an_artifact_takes_follows_from_the_manifest",
            "test_a_card_must_agree_on_which_windows_were_validated",
        ),
    ),
    Fault(
        "C++ does not check the digests of files",
        "    if (actual != listed) {\n",
        "    if (false) {\n",
        ("test_a_folder_that_is_not_the_sealed_bundle",),
    ),
    Fault(
        "C++ accepts the promotion of another bundle",
        "if (digest == bundle.digest) return ref;",
        "return ref;",
        ("test_production_asks_for_a_promotion_of_this_bundle",),
    ),
    Fault(
        "C++ is content with a signature by one of several groups of keys",
        "if (of_this_bundle && signed_here) continue;",
        "if (of_this_bundle && signed_here) return;",
        ("test_each_group_of_keys_must_have_signed",),
    ),
    Fault(
        "C++ accepts a signature of other files",
        "if (of_this_bundle && signed_here) continue;",
        "if (of_this_bundle || signed_here) continue;",
        ("test_a_signature_is_of_exactly_these_files",),
    ),
    Fault(
        "C++ does not check the files again after it has opened them",
        '  bundle.require_unchanged(choice.folder + "/");\n',
        "",
        ("test_a_file_that_is_replaced_while_cpp_opens_it",),
    ),
    Fault(
        "C++ runs targets that are not verified in production",
        "} else if ((loading.test == 0 || wanted.empty()) && ",
        "} else if (wanted.empty() && ",
        ("test_cpp_runs_in_production_only_what_was_verified",),
    ),
    Fault(
        "C++ runs engines that are not valid in production",
        """if (!test && candidate["status"].text() != "valid") {""",
        """if (test && candidate["status"].text() != "valid") {""",
        ("test_cpp_runs_in_production_only_what_was_verified",),
    ),
    Fault(
        "test mode of C++ accepts every answer",
        "worst->outside += gap > allowed ? 1 : 0;",
        "worst->outside += gap > allowed ? 0 : 0;",
        ("test_test_mode_runs_the_bundles_own_reference",),
    ),
    Fault(
        "in Python, rows that one call left out are left out by all later calls",
        "wanted = self.bound if rows is None else",
        "wanted = self.rows if rows is None else",
        ("test_rows_of_a_call_are_for_that_call",),
    ),
    Fault(
        "run_many runs only as many rows as the last call",
        "            for binding in bindings:\n                binding.use_all()\n",
        "",
        ("test_many_bindings_run_on_their_bound_rows",),
    ),
    Fault(
        "answers may be written into a copy instead of the user's memory",
        "collection, copied = collection.to(collection.device, layout).locked(), set(columns)",
        "collection, copied = collection.to(collection.device, layout), set(columns)",
        ("test_what_was_copied_is_no_output",),
    ),
    # Servers
    Fault(
        "another bundle in the server is not noticed when connecting",
        "        if served != digest:\n            raise VersionMismatch",
        "        if False:\n            raise VersionMismatch",
        ("test_another_bundle_under_the_same_name",),
    ),
    Fault(
        "another bundle in the server is not noticed by a request",
        "if request.digest is not None and request.digest != self._digest:",
        "if False:",
        ("test_another_bundle_was_asked_for",),
    ),
    Fault(
        "a forked child uses its parent's shared regions",
        "        if os.getpid() != self._pid:\n            raise RunError(",
        "        if False:\n            raise RunError(",
        ("test_remote.test_a_fork_leaves_the_session_to_its_parent",),
    ),
    Fault(
        "requests are merged into one run although their rows see each other",
        "return not any(_find_difference(",
        "return True or any(_find_difference(",
        ("test_whether_rows_may_share_a_run",),
    ),
    Fault(
        "a region that a late server may write into is used again",
        "reusable = not (region.doubtful or self._closed)",
        "reusable = not self._closed",
        ("test_a_region_of_a_request_that_was_tried_again_is_nobody_elses",),
    ),
    Fault(
        "a server's answer that has another shape is accepted",
        "            if (datatype, shape) != (tensor.datatype, needed_shape):\n",
        "            if False:\n",
        ("test_a_wrong_answer_is_refused_and_nothing_written",),
    ),
    Fault(
        "NaN in a server's answer is passed on",
        "        if self.client.options.allow_nan:\n",
        "        if True:\n",
        ("test_a_wrong_answer_is_refused_and_nothing_written",),
    ),
    Fault(
        "an answer is written though a later part of it fails",
        "            progress.add(codec, None if rows == left else sum(rows.values()), answers)\n",
        "            progress.add(codec, None if rows == left else sum(rows.values()), answers)\n"
        "            progress.write()\n",
        ("test_a_part_that_fails_leaves_nothing_written",),
    ),
    Fault(
        "each message of a request has a deadline of its own",
        "until = min(time.monotonic() + within_s, self._thread.until)",
        "until = time.monotonic() + within_s",
        ("test_several_messages_have_one_deadline",),
    ),
    Fault(
        "the next part of a request begins where the last one did",
        "        self.at += rows or 0\n",
        "        self.at += 0\n",
        ("test_more_rows_than_a_message_carries_are_sent_in_several",),
    ),
    Fault(
        "a connection is made without TLS although the options ask for TLS",
        "return grpc.ssl_channel_credentials(root, key, chain)",
        "return None",
        ("test_a_server_whose_tls_fails_gets_nothing",),
    ),
    # Jobs on files
    Fault(
        "a part of a job counts as complete although rows are missing",
        "return bool(sum(counts) == piece.rows)",
        "return bool(sum(counts) >= 0)",
        ("test_a_job_goes_on_where_it_was",),
    ),
    Fault(
        "a job continues although its settings have changed",
        "if changed := [name for name in record if earlier.get(name) != record[name]]:",
        "if changed := [name for name in record if name not in record]:",
        ("test_a_job_does_not_go_on_as_another",),
    ),
    Fault(
        "a file that was changed since a job began is scored",
        "if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):",
        "if status.st_size < 0:",
        ("test_a_file_that_changes_meanwhile_is_refused",),
    ),
    Fault(
        "files are scored by a model whose rows see each other",
        "if np.count_nonzero(~agree) > limit.max_outside * agree.size:",
        "if np.count_nonzero(~agree) > agree.size:",
        ("test_a_model_whose_rows_see_each_other_scores_no_file",),
    ),
    Fault(
        "a job continues although its mode has changed",
        "str(opening.ref), opening.mode, settings])",
        "str(opening.ref), settings])",
        ("test_a_job_of_another_mode_is_another_job",),
    ),
    Fault(
        "outputs of other jobs count as done",
        "if _read_job_key(output.path) != key]",
        "if _read_job_key(output.path) is None]",
        ("test_a_job_of_another_mode_is_another_job",),
    ),
    Fault(
        "nulls are written to formats that have no nulls",
        "if array.null_count and among(array.type):",
        "if False:",
        ("test_formats_of_numbers_refuse_nulls",),
    ),
    Fault(
        "nulls inside rows are written to formats that have no nulls",
        "return sum(count_nulls(values, among) for values in inner)",
        "return 0",
        ("test_formats_of_numbers_refuse_nulls",),
    ),
    Fault(
        "a file that appears while a job runs is replaced",
        "parts.rows(output, job.key()), folder, over=force)",
        "parts.rows(output, job.key()), folder)",
        ("test_a_file_that_appears_meanwhile_stays",),
    ),
    Fault(
        "parts that a format cannot hold stay and block other jobs",
        ('for part in folder.glob("*.arrow"):\n            part.unlink()'),
        "pass",
        ("test_what_a_format_cannot_hold_leaves_nothing",),
    ),
    Fault(
        "the parts of a changed file have the names of the old parts",
        'f"{key}{file}"',
        'f"{key}{file.path}"',
        ("test_parts_of_a_file_that_was_changed_have_other_names",),
    ),
    Fault(
        "files with different column types become one output",
        "if not table.schema.equals(schema):",
        "if False:",
        ("test_files_of_other_types_do_not_become_one",),
    ),
    Fault(
        "jagged columns with different offsets are scored together",
        "if column.cut != columns[0].cut:",
        "if len(column.values) != len(columns[0].values):",
        ("test_items_that_are_not_the_same",),
    ),
    Fault(
        "each run on a batch gets the batch's first rows",
        "_copy_rows(columns, slice(low, high), self._memory",
        "_copy_rows(columns, slice(0, high - low), self._memory",
        ("test_rows_out_are_rows_in",),
    ),
    Fault(
        "more items are bound than a run can take",
        "high = max(min(high, fits), low + 1)",
        "high = max(high, fits, low + 1)",
        ("test_whole_events",),
    ),
    Fault(
        "fewer rows are bound than a run needs",
        "self._binding(max(rows, self._least))",
        "self._binding(rows)",
        ("test_fewer_rows_than_a_run_takes",),
    ),
    Fault(
        "one column of a file becomes two columns of the model",
        "if match in guessed:",
        "if False:",
        ("test_one_column_is_not_two",),
    ),
    Fault(
        "columns of a TTree share a counter although their numbers of items differ",
        "if np.array_equal(known, counts[name]):",
        "if len(known) == len(counts[name]):",
        ("test_names_that_do_not_say_what_the_rows_have",),
    ),
    # Decision trees
    Fault(
        "a missing value goes to the other side",
        "np.where(left, -np.inf, np.inf)",
        "np.where(left, np.inf, -np.inf)",
        ("test_every_row_reaches_its_leaf",),
    ),
    Fault(
        "a threshold between two float32 is rounded to the nearer one",
        "return np.where(near > threshold, np.nextafter(near, np.float32(-np.inf)), near)",
        "return near",
        ("test_every_row_reaches_its_leaf",),
    ),
    Fault(
        "a row keeps the nodes of a mask that it has not passed",
        "(masked + half) * K::step",
        "(masked + half - 1) * K::step + 1",
        ("test_every_row_reaches_its_leaf",),
    ),
    Fault(
        "a tree of several words is read as if it had one",
        "word_a_tree = len(forest.words) == len(forest.trees)",
        "word_a_tree = True",
        ("test_every_row_reaches_its_leaf",),
    ),
    # Headers of networks, and kernels
    Fault(
        "a header lets nvcc make an fma of a product and a sum",
        "#if defined(ROUNDED_PRODUCTF)  // for compilers",
        "#if 0  // for compilers",
        ("test_a_gpu_compiler_takes_the_file_and_fuses_nothing",),
    ),
    Fault(
        "a header lets g++ make an fma of a product and a sum",
        '#pragma GCC optimize("fp-contract=off", "wrapv")',
        '#pragma GCC optimize("wrapv")',
        ("test_any_compiler_gives_the_bits",),
    ),
    Fault(
        "a bool that is one or the other becomes -1 as a number",
        "({in_brackets(arguments[0])} & 1)",
        "({arguments[0]} & 1)",
        ("test_a_bool_of_two_is_0_or_1_as_a_number",),
    ),
    Fault(
        "in a header, g++ may take an overflow of integers for impossible",
        '#pragma GCC optimize("fp-contract=off", "wrapv")',
        '#pragma GCC optimize("fp-contract=off")',
        ("test_any_compiler_gives_the_bits",),
    ),
    Fault(
        "in a library, g++ may take an overflow of integers for impossible",
        '"-fwrapv",\n    "-fno-math-errno"',
        '"-fno-math-errno"',
        ("test_integers_are_those_of_eager_torch_also_where_they_overflow",),
    ),
    Fault(
        "the threads of a block do not wait for each other",
        '"}", "BLOCK_WAITS;"]',
        '"}"]',
        ("test_threads_that_take_turns_give_the_answers",),
    ),
    Fault(
        "a tile on a GPU: at an edge it hands out sums that are not there",
        "if (a < K::m && b < K::j && c < own_rows) out(a, b, c, sum);",
        "out(a, b, c, sum);",
        ("test_threads_that_take_turns_give_the_answers",),
    ),
    Fault(
        "a tile on a GPU: the weights of the next step are not those of its columns",
        "weights += kAcross * kJ;",
        "weights += K::j;",
        ("test_threads_that_take_turns_give_the_answers",),
    ),
    Fault(
        "a block on a GPU: rows behind the last one are computed",
        "if (r >= own_rows) continue;",
        "",
        ("test_threads_that_take_turns_give_the_answers",),
    ),
    Fault(
        "a few rows of a product: the second row gets the first one's numbers",
        "const N value = ((const N *)(x + a * K::left))[r];",
        "const N value = ((const N *)(x + a * K::left))[0];",
        ("test_few_rows_have_the_bits_of_many",),
    ),
    Fault(
        "a few rows of a product: the weights of the next block are taken",
        "weights + q * kJ * S::count, sizeof own[q]",
        "weights + q * kJ, sizeof own[q]",
        ("test_few_rows_have_the_bits_of_many",),
    ),
    Fault(
        "the last row alone is the first row",
        "return width::block(columns, items, row, scratch, 1);",
        "return width::block(columns, items, 0, scratch, 1);",
        ("test_few_rows_have_the_bits_of_many",),
    ),
    Fault(
        "a row that goes down takes the right child at a threshold",
        "next = node[1] + !(kEqual ? x <= limit : x < limit);",
        "next = node[1] + !(x < limit);",
        ("test_every_row_reaches_its_leaf",),
    ),
    Fault(
        "a block with few rows is told that it has one",
        "block(own, items, 0, scratch, (int)(end - row))",
        "block(own, items, 0, scratch, 1)",
        ("test_every_row_reaches_its_leaf",),
    ),
)
