// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"fmt"
	"syscall"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// socketFilter is a BPF program of sockets.
type socketFilter struct {
	object   *kernel.Object
	followed map[ruleset.TableID]struct{} // as the program knows them
}

// LoadFilter loads the program. The caller closes the filter. types may be nil.
func LoadFilter(types *kernel.Types) (Filter, error) {
	o, err := kernel.Open(types, kernel.Config{
		Files: []kernel.File{bpf.LoadNft}, Maps: []string{bpf.NftMapFollowed, bpf.NftMapFilterStates},
	})
	if err != nil {
		return nil, fmt.Errorf("filter notifications of nftables: %w", err)
	}
	f := &socketFilter{object: o, followed: make(map[ruleset.TableID]struct{})}
	err = o.Attach([]string{bpf.NftProgNftFilter})
	o.FinishAttach()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("filter notifications of nftables: %w", err)
	}
	return f, nil
}

// Close implements Filter. Sockets that have the program keep it.
func (f *socketFilter) Close() error { return f.object.Close() }

func (f *socketFilter) attach(socket syscall.Conn) error {
	return f.object.FilterSocket(bpf.NftProgNftFilter, socket)
}

// follow implements Filter. A table stays followed: one that is deleted is often made
// again, and then nothing of it is missed.
func (f *socketFilter) follow(tables []*ruleset.Table) error {
	for _, t := range tables {
		if _, ok := f.followed[t.ID]; ok {
			continue
		}
		key := bpf.NftFollowedTable{Family: t.ID.Family}
		if len(t.ID.Name) < len(key.Name) { // what has a longer name passes
			copy(key.Name[:], t.ID.Name)
			if err := f.object.Map(bpf.NftMapFollowed).Put(key, uint8(1)); err != nil {
				return fmt.Errorf("follow table %s: %w", t.ID, err)
			}
		}
		f.followed[t.ID] = struct{}{}
	}
	return nil
}

func (f *socketFilter) passed() (generation uint32, err error) {
	var s bpf.NftFilterState
	if err := f.object.Map(bpf.NftMapFilterStates).Lookup(uint32(0), &s); err != nil {
		return 0, fmt.Errorf("read the state of the filter: %w", err)
	}
	return s.Generation, nil
}
