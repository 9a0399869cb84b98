// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hook

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/kernel/bpf"
)

// ErrCommitsLost says that commits were missed, so that the ruleset must be dumped.
var ErrCommitsLost = errors.New("changes of nftables were lost")

// Commits reports what nftables commits in one network namespace.
type Commits struct {
	method  string
	object  *kernel.Object
	reader  *kernel.Reader
	decoder decoder
	lost    uint32 // as far as it was reported
	active  bool   // records were read since the loss counter was last read
}

// OpenCommits attaches one method, kernel.MethodFentry or kernel.MethodKprobe, to
// nftables in the network namespace at path, empty for that of the process. It
// fails if nf_tables is a module that is not loaded. The caller calls Close. types
// may be nil.
func OpenCommits(path, method string, types *kernel.Types) (*Commits, error) {
	c := &Commits{method: method}
	if err := c.open(path, types); err != nil {
		return nil, fmt.Errorf("observe nftables: %s: %w", method, errors.Join(err, c.Close()))
	}
	return c, nil
}

func (c *Commits) open(path string, types *kernel.Types) error {
	netns, err := kernel.NamespaceInode(path)
	if err != nil {
		return err
	}
	load, hooks, err := programs(c.method)
	if err != nil {
		return err
	}
	c.object, err = kernel.Open(types, kernel.Config{
		Files:     []kernel.File{load},
		Constants: map[string]any{bpf.NftVarObservedNetns: netns},
		Maps:      []string{bpf.NftMapCommits, bpf.NftMapStates},
	})
	if err != nil {
		return err
	}
	if c.reader, err = c.object.Reader(bpf.NftMapCommits); err != nil {
		return err
	}
	defer c.object.FinishAttach()
	return c.object.Attach(hooks)
}

// programs returns the hooks of a method and their file. What begins a commit is
// attached last, so that one that is reported in part is noticed.
func programs(method string) (kernel.File, []string, error) {
	switch method {
	case kernel.MethodFentry:
		return bpf.LoadNft, []string{
			"nft_ends", "nft_table", "nft_chain", "nft_rule", "nft_element", "nft_begins",
		}, nil
	case kernel.MethodKprobe:
		return bpf.LoadNftKprobes, []string{
			"nft_kp_ends", "nft_kp_table", "nft_kp_chain", "nft_kp_rule", "nft_kp_element", "nft_kp_begins",
		}, nil
	}
	return nil, nil, fmt.Errorf("method %q: %w", method, errors.ErrUnsupported)
}

// Method names the mechanism in use.
func (c *Commits) Method() string { return c.method }

// lossDelay is how long after the last record the loss counter is read. A record
// is lost only while the ring is full of others that are not yet read.
const lossDelay = 100 * time.Millisecond

// Next blocks until a commit is complete and returns its changes, the last of
// kind CommitEnd. It returns ErrCommitsLost after a loss, and may be called again.
// After Close it returns os.ErrClosed. One goroutine at a time.
func (c *Commits) Next() ([]CommitEvent, error) {
	var out []CommitEvent
	for {
		var deadline time.Time
		if c.active {
			deadline = time.Now().Add(lossDelay)
		}
		c.reader.SetDeadline(deadline)
		record, err := c.reader.Read()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			c.active = false
			if err := c.lossCheck(); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, fmt.Errorf("observe nftables: %w", err)
		}
		c.active = true
		e, complete, err := c.decoder.add(record)
		if err != nil {
			c.decoder = decoder{}
			return nil, errors.Join(ErrCommitsLost, err)
		}
		if !complete {
			continue
		}
		if e.Kind == commitStray {
			return nil, fmt.Errorf("%w: a change outside of a commit", ErrCommitsLost)
		}
		out = append(out, e)
		if e.Kind == CommitEnd {
			return out, c.lossCheck()
		}
	}
}

// lossCheck returns ErrCommitsLost if records were lost since it last did.
func (c *Commits) lossCheck() error {
	var s bpf.NftCommit
	if err := c.object.Map(bpf.NftMapStates).Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("observe nftables: read the count of losses: %w", err)
	}
	if s.Lost == c.lost {
		return nil
	}
	err := fmt.Errorf("%w: %d records found no room", ErrCommitsLost, s.Lost-c.lost)
	c.lost = s.Lost
	return err
}

// Close detaches and ends Next. It may be called more than once.
func (c *Commits) Close() error {
	if c.object == nil {
		return nil
	}
	return c.object.Close()
}
