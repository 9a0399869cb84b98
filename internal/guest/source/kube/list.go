// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
)

// pageSize is how many objects are in memory whole at once. A large cluster's
// list would else be what the agent's memory is measured by.
const pageSize = 250

// listFunc asks the server for one page.
type listFunc func(o metav1.ListOptions) (runtime.Object, error)

// lean is what is kept of an object, as an object for a reflector to carry.
type lean[T any] struct {
	metav1.TypeMeta

	value T
}

// DeepCopyObject implements runtime.Object.
func (l *lean[T]) DeepCopyObject() runtime.Object { c := *l; return &c }

// leanList is a list of these.
type leanList[T any] struct {
	metav1.TypeMeta
	metav1.ListMeta

	Items []lean[T]
}

// DeepCopyObject implements runtime.Object.
func (l *leanList[T]) DeepCopyObject() runtime.Object { c := *l; return &c }

// leanServices lists Services and keeps what compact does.
func leanServices(list listFunc) (runtime.Object, error) {
	return pages(list, func(page *object.ServiceList, each func(service)) {
		for i := range page.Items {
			each(compact(&page.Items[i]))
		}
	})
}

// leanSlices lists EndpointSlices and keeps what compactSlice does.
func leanSlices(list listFunc) (runtime.Object, error) {
	return pages(list, func(page *object.EndpointSliceList, each func(endpoints)) {
		for i := range page.Items {
			each(compactSlice(&page.Items[i]))
		}
	})
}

// pages lists all objects, page by page. If the server forgets the list between
// two pages, it is asked again, for all at once.
func pages[List runtime.Object, T any](list listFunc, read func(page List, each func(T))) (*leanList[T], error) {
	all := new(leanList[T])
	o := metav1.ListOptions{Limit: pageSize}
	for {
		obj, err := list(o)
		if apierrors.IsResourceExpired(err) && o.Continue != "" {
			all.Items, o = nil, metav1.ListOptions{}
			continue
		}
		if err != nil {
			return nil, err
		}
		page, ok := obj.(List)
		if !ok {
			return nil, fmt.Errorf("a list is a %T", obj)
		}
		m, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}
		read(page, func(v T) { all.Items = append(all.Items, lean[T]{value: v}) })
		if o.Continue = m.GetContinue(); o.Continue == "" {
			all.ResourceVersion = m.GetResourceVersion()
			return all, nil
		}
	}
}
