// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// ErrCommitsLost says that commits were not told, so that only a dump of the
// ruleset can tell the truth.
var ErrCommitsLost = errors.New("changes of nftables were lost")

// Commits tells what nftables commits in one network namespace.
type Commits struct {
	method  string
	states  *ebpf.Map
	reader  *ringbuf.Reader
	made    closers
	decoder nftDecoder
	record  ringbuf.Record
	lost    uint32 // as far as was told
	active  bool   // records were read since the loss counter was last looked at
	once    sync.Once
	closed  error
}

// commitHooks are the programs of each method in the order in which they are
// attached: what begins a commit last, so that one that is told in part is noticed.
var commitHooks = map[string][]string{
	MethodFentry: {"nft_ends", "nft_table_told", "nft_chain_told", "nft_rule_told", "nft_element_told", "nft_begins"},
	MethodKprobe: {"nft_kp_ends", "nft_kp_table", "nft_kp_chain", "nft_kp_rule", "nft_kp_element", "nft_kp_begins"},
}

// CommitMethods returns the methods that OpenCommits takes, best first.
func CommitMethods() []string { return []string{MethodFentry, MethodKprobe} }

// OpenCommits attaches one method, MethodFentry or MethodKprobe, to nftables in the
// network namespace at path, empty for that of the process. It fails if
// nf_tables is a module that is not loaded. The caller calls Close. types may be nil.
func OpenCommits(path, method string, types *Types) (*Commits, error) {
	inode, err := netnsInode(path)
	if err != nil {
		return nil, fmt.Errorf("observe nftables: %w", err)
	}
	c := &Commits{method: method}
	if err := types.lend(func(cache *btf.Cache) error { return c.attach(inode, cache) }); err != nil {
		return nil, fmt.Errorf("observe nftables: %s: %w", method, errors.Join(err, c.Close()))
	}
	return c, nil
}

func netnsInode(path string) (uint32, error) {
	if path == "" {
		path = "/proc/self/ns/net"
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("network namespace: %w", &os.PathError{Op: "stat", Path: path, Err: err})
	}
	return uint32(st.Ino), nil
}

func (c *Commits) attach(netns uint32, types *btf.Cache) error {
	load := loadNft
	if c.method == MethodKprobe {
		// Asked first, because to load the programs takes the agent 0.1 s of its start.
		if _, err := os.Stat("/sys/bus/event_source/devices/kprobe"); err != nil {
			return fmt.Errorf("kprobes: %w", err)
		}
		load = loadNftKprobes
	}
	hooks := commitHooks[c.method]
	spec, err := load()
	if err != nil {
		return err
	}
	if spec == nil || hooks == nil {
		return errNoHook
	}
	if err := spec.Variables[nftVarObservedNetns].Set(netns); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	// These only name types for generation.
	delete(spec.Maps, ".bss")
	delete(spec.Variables, nftVarUnusedNftEvent)
	delete(spec.Variables, nftVarUnusedNftKind)
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Cache: types})
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	c.made = append(c.made, closer(func() error { collection.Close(); return nil }))
	c.states = collection.Maps[nftMapStates]
	if c.reader, err = ringbuf.NewReader(collection.Maps[nftMapCommits]); err != nil {
		return fmt.Errorf("ring buffer: %w", err)
	}
	c.made = append(c.made, c.reader)
	for _, hook := range hooks {
		on, err := c.attachHook(collection.Programs[hook], spec.Programs[hook].AttachTo)
		if err != nil {
			return fmt.Errorf("attach %s: %w", hook, err)
		}
		c.made = append(c.made, on)
	}
	return nil
}

func (c *Commits) attachHook(p *ebpf.Program, to string) (io.Closer, error) {
	if c.method == MethodKprobe {
		return link.Kprobe(to, p, nil)
	}
	return link.AttachTracing(link.TracingOptions{Program: p})
}

// Method names the mechanism in use.
func (c *Commits) Method() string { return c.method }

// lossDelay is how long after the last record the loss counter is looked at. A
// record is lost only while the ring is full of others that are not yet read.
const lossDelay = 100 * time.Millisecond

// Next blocks until a commit is complete and returns its changes, the last of
// kind CommitEnd. It returns ErrCommitsLost after a loss, and goes on after it.
// After Close it returns os.ErrClosed. One goroutine at a time.
func (c *Commits) Next() ([]CommitEvent, error) {
	var out []CommitEvent
	for {
		if c.active {
			c.reader.SetDeadline(time.Now().Add(lossDelay))
		} else {
			c.reader.SetDeadline(time.Time{})
		}
		err := c.reader.ReadInto(&c.record)
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
		e, complete, err := c.decoder.add(c.record.RawSample)
		if err != nil {
			c.decoder = nftDecoder{}
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
	var s nftNftCommit
	if err := c.states.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("observe nftables: look at losses: %w", err)
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
	c.once.Do(func() {
		slices.Reverse(c.made)
		c.closed = c.made.Close()
	})
	return c.closed
}
