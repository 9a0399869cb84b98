// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// Hookable implements system: nf_tables is loaded. Where it is built in that
// never changes, and is not seen here.
func (k *Kernel) Hookable() bool {
	state, err := os.ReadFile("/sys/module/nf_tables/initstate")
	return err == nil && string(bytes.TrimSpace(state)) == "live"
}

// hookStream reports commits to tables with a nat chain, by BPF hooks.
type hookStream struct {
	object  *kernel.Object
	reader  *kernel.Reader
	decoder decoder
	lost    uint32 // records, as far as it was reported
	misses  uint64 // of hooks, as far as it was reported
	active  bool   // records were read since the kernel's counters were last read
	armed   bool   // they will be read when the reader's deadline is over
}

// watchHooks attaches one method, MethodFentry or MethodKprobe. It fails if
// nf_tables is a module that is not loaded.
func (k *Kernel) watchHooks(method string) (Stream, error) {
	s := &hookStream{}
	if err := s.open(k.path, method, k.types); err != nil {
		return nil, fmt.Errorf("observe nftables: %s: %w", method, errors.Join(err, s.Close()))
	}
	return s, nil
}

func (s *hookStream) open(path, method string, types *kernel.Types) error {
	netns, err := kernel.NamespaceInode(path)
	if err != nil {
		return err
	}
	load, hooks, err := programs(method)
	if err != nil {
		return err
	}
	s.object, err = kernel.Open(types, kernel.Config{
		Files:     []kernel.File{load},
		Constants: map[string]any{bpf.NftVarObservedNetns: netns},
		Maps:      []string{bpf.NftMapCommits, bpf.NftMapStates},
	})
	if err != nil {
		return err
	}
	if s.reader, err = s.object.Reader(bpf.NftMapCommits); err != nil {
		return err
	}
	defer s.object.FinishAttach()
	return s.object.Attach(hooks)
}

// programs returns the hooks of a method and their file. What begins a commit is
// attached last, so that one that is reported in part is noticed.
func programs(method string) (kernel.File, []string, error) {
	switch method {
	case MethodFentry:
		return bpf.LoadNft, []string{
			"nft_ends", "nft_table", "nft_chain", "nft_rule", "nft_element", "nft_begins",
		}, nil
	case MethodKprobe:
		return bpf.LoadNftKprobes, []string{
			"nft_kp_ends", "nft_kp_table", "nft_kp_chain", "nft_kp_rule", "nft_kp_element", "nft_kp_begins",
		}, nil
	}
	return nil, nil, fmt.Errorf("method %q: %w", method, errors.ErrUnsupported)
}

// Close implements Stream. It detaches the hooks. It may be called more than once.
func (s *hookStream) Close() error {
	if s.object == nil {
		return nil
	}
	return s.object.Close()
}

// lossDelay is how long after a record the kernel's counters are read. A record is
// lost only while the ring is full of others that are not yet read.
const lossDelay = 100 * time.Millisecond

// Next implements Stream. It returns one commit.
func (s *hookStream) Next() ([]*ruleset.Message, error) {
	var out []*ruleset.Message
	many := false
	for {
		if err := s.read(); err != nil {
			return nil, err
		}
		switch s.decoder.head.Kind {
		case changeStray:
			return nil, fmt.Errorf("%w: a change outside of a commit", ErrLost)
		case changeMany:
			many = true
			continue
		}
		m, err := s.decoder.message()
		if err != nil {
			return nil, errors.Join(ErrLost, err)
		}
		out = append(out, m)
		if m.Type != ruleset.MsgNewGen {
			continue
		}
		if err := s.checkLost(s.decoder.head.Lost); err != nil {
			return nil, err
		}
		if many {
			return nil, ErrMany
		}
		return out, nil
	}
}

// read reads the next record into the decoder. It returns ErrLost after a loss.
func (s *hookStream) read() error {
	for complete := false; !complete; {
		if s.active && !s.armed && !s.reader.Ready() { // about to wait
			s.armed = true
			s.reader.SetDeadline(time.Now().Add(lossDelay))
		}
		chunk, err := s.reader.Read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			s.active, s.armed = false, false
			s.reader.SetDeadline(time.Time{})
			if err := s.checkCounters(); err != nil {
				return err
			}
			continue
		case err != nil:
			return fmt.Errorf("observe nftables: %w", err)
		}
		s.active = true
		if complete, err = s.decoder.add(chunk); err != nil {
			s.decoder = decoder{}
			return errors.Join(ErrLost, err)
		}
	}
	return nil
}

// state reads what the hooks keep.
func (s *hookStream) state() (c bpf.NftCommit, err error) {
	if err := s.object.Map(bpf.NftMapStates).Lookup(uint32(0), &c); err != nil {
		return c, fmt.Errorf("observe nftables: read the state of the hooks: %w", err)
	}
	return c, nil
}

// checkCounters returns ErrLost if records were lost or hooks skipped since the last check.
func (s *hookStream) checkCounters() error {
	c, err := s.state()
	if err != nil {
		return err
	}
	if n := s.object.Misses(); n != s.misses {
		err := fmt.Errorf("%w: %d hooks were skipped", ErrLost, n-s.misses)
		s.misses = n
		return err
	}
	return s.checkLost(c.Lost)
}

func (s *hookStream) checkLost(lost uint32) error {
	if lost == s.lost {
		return nil
	}
	err := fmt.Errorf("%w: %d records", ErrLost, lost-s.lost)
	s.lost = lost
	return err
}

// Reported implements Stream.
func (s *hookStream) Reported() (reported, ended uint32, sparse bool, err error) {
	c, err := s.state()
	return c.Reported, c.Generation, true, err
}
